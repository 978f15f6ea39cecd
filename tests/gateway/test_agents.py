"""What agents and SDKs send by default: tools that are not executed, hints without a meaning, unknown nested fields."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from chatcache.conversations.prompt import Message
from chatcache.gateway.websocket import streams
from tests.gateway.described import Described
from tests.gateway.frames import send, until_end
from tests.gateway.scripted import ScriptedServer, hermes_server

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SHELL = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}, {"type": "custom", "name": "x"}],
}
# The shape of the first request of Codex 0.169.
CODEX: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
    ],
    "tools": [SHELL, NAMESPACE, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "key",
    "client_metadata": {"session": "s"},
}
CODEX_IGNORED = [
    *("tools.tools.custom", "tools.web_search", "include.reasoning.encrypted_content"),
    *("prompt_cache_key", "client_metadata"),
]


module_server = hermes_server


def ask(server: ScriptedServer, path: str = RESPONSES, **body: object) -> dict[str, Any]:
    status, _, answer = server.post(path, **body)
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


def test_request_of_codex_is_answered_and_names_what_was_ignored(server: ScriptedServer) -> None:
    server.say("Hi.")
    status, headers, answer = server.post(RESPONSES, **CODEX)
    assert status == 200, answer
    assert sorted(answer["ignored"]) == sorted(CODEX_IGNORED)
    assert sorted(headers["x-chatcache-ignored"].split(", ")) == sorted(CODEX_IGNORED)
    assert [tool["name"] for tool in answer["tools"]] == ["shell", "agents.spawn"]


def test_function_of_a_namespace_is_called_by_its_qualified_name(server: ScriptedServer) -> None:
    server.say('<tool_call>\n{"name": "agents.spawn", "arguments": {"task": "x"}}\n</tool_call>')
    first = ask(server, **CODEX)
    (call,) = first["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("agents", "spawn", '{"task": "x"}')
    Described(server.request("GET", "/openapi.json")[2]).check("POST", RESPONSES, 200, first)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    server.say("Done.")
    second = ask(server, **{**CODEX, "input": [*CODEX["input"], call, result]})
    assert second["output"][0]["content"][0]["text"] == "Done."
    used, cached = first["usage"], second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= used["input_tokens"] + used["output_tokens"] - 8  # the call went back as it was generated


def test_streamed_call_of_a_namespace_has_the_name_in_all_events(server: ScriptedServer) -> None:
    server.say('<tool_call>\n{"name": "agents.spawn", "arguments": {}}\n</tool_call>')
    _, data = server.stream(RESPONSES, **CODEX)
    assert data.count(b'"namespace":"agents"') == 3  # item added, item done, response completed
    assert b'"name":"spawn"' in data and b'"name":"agents.spawn","arguments"' not in data


def test_only_tools_that_are_not_executed_leave_no_tools(server: ScriptedServer) -> None:
    server.say("Hi.")
    answer = ask(server, input="Hello.", tools=[{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}])
    assert (answer["tools"], answer["ignored"]) == ([], ["tools.web_search", "tools.custom"])
    status, _, refused = server.post(RESPONSES, input="Hi", tools=[{"type": "web_search"}], tool_choice="required")
    assert (status, refused["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"reasoning": {"effort": None}}, None),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "disabled"}, None),
        ({"include": ["nonsense", "message.output_text.logprobs"]}, "include.nonsense"),
        ({"input": [{"role": "user", "content": "Hi", "zzz": 1, "status": "completed", "yyy": None}]}, "input.zzz"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "cache": 1}]}]},
            "input.content.cache",
        ),
        ({"tools": [{**SHELL, "output_schema": {}}]}, "tools.output_schema"),
        ({"text": {"format": {"type": "text", "zzz": 1}}}, "text.format.zzz"),
        ({"stream_options": {"include_obfuscation": False, "zzz": 1}}, "stream_options.zzz"),
    ],
)
def test_response_field_without_a_meaning_is_named(
    server: ScriptedServer, fields: dict[str, object], ignored: str | None
) -> None:
    server.say("Hi.")
    status, headers, answer = server.post(RESPONSES, **{"input": "Hello.", "max_output_tokens": 1, **fields})
    assert status == 200, answer
    assert headers.get("x-chatcache-ignored") == ignored


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"reasoning_effort": "high", "verbosity": "low"}, "reasoning_effort, verbosity"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"tools": [{"type": "function", "function": {"name": "f", "zzz": 1}}]}, "tools.function.zzz"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.custom"),
        ({"response_format": {"type": "text", "zzz": 1}}, "response_format.zzz"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "zzz": 1}}},
            "response_format.json_schema.zzz",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi", "zzz": {}}, {"role": "user", "content": "a", "zzz": 1}]},
            "messages.zzz",
        ),
    ],
)
def test_chat_field_without_a_meaning_is_named(server: ScriptedServer, fields: dict[str, object], ignored: str) -> None:
    server.say("Hi.")
    messages = [{"role": "user", "content": "Hello."}]
    status, headers, answer = server.post(CHAT, **{"messages": messages, "max_tokens": 1, **fields})
    assert status == 200, answer
    assert headers["x-chatcache-ignored"] == ignored


def test_refusals_in_the_history_are_text(server: ScriptedServer) -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    counts = []
    for message in ({"content": [part]}, {"content": "I cannot."}):
        history = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", **message},
            {"role": "user", "content": "?"},
        ]
        counts.append(ask(server, f"{RESPONSES}/input_tokens", input=history)["input_tokens"])
    assert counts[0] == counts[1]
    server.say("Ok.")
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    answer = ask(server, CHAT, messages=[{"role": "user", "content": "Hi"}, refused, {"role": "user", "content": "?"}])
    assert answer["usage"]["prompt_tokens"] == counts[0]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES])
@pytest.mark.parametrize("excess", [0, 1, 100_000])
def test_limit_beyond_the_context_is_clamped_and_reported(server: ScriptedServer, path: str, excess: int) -> None:
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": ["Hi", "Hi there, all of you"]},
        RESPONSES: {"input": "Hi"},
    }
    prompt = prompts[path]
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    server.say("Hi.")
    usage = ask(server, path, **prompt, **{name: 1})["usage"]
    longest = usage.get("prompt_tokens", usage.get("input_tokens"))
    if path == "/v1/completions":
        longest = ask(server, path, prompt=prompt["prompt"][1])["usage"]["prompt_tokens"]
    room = server.max_model_len - longest
    server.say("Hi.")
    status, headers, answer = server.post(path, **prompt, **{name: room + excess})
    assert status == 200, answer
    reported = str(answer["max_output_tokens"]) if path == RESPONSES else headers.get("x-chatcache-max-tokens")
    assert reported == (None if path != RESPONSES and not excess else str(room))


def test_item_references_are_replaced_by_the_stored_items(server: ScriptedServer) -> None:
    server.say('<think>hm</think>Look.\n<tool_call>\n{"name": "shell", "arguments": {"a": 1}}\n</tool_call>')
    user = {"role": "user", "content": "Look around."}
    first = ask(server, input=[user], tools=[SHELL])
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "ok"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    counts = [
        ask(server, f"{RESPONSES}/input_tokens", input=[user, *items, result], tools=[SHELL])["input_tokens"]
        for items in (first["output"], references, [{"id": each["id"]} for each in references])
    ]
    assert len(set(counts)) == 1
    server.say("Done.")
    second = ask(server, input=[user, *references, result], tools=[SHELL])
    assert second["usage"]["input_tokens"] == counts[0] and "ignored" not in second


@pytest.mark.parametrize("item_id", ["msg_0000", "rs_", "fc_1_2", "", "conv_x"])
def test_reference_to_an_unknown_item_is_refused_by_its_field(server: ScriptedServer, item_id: str) -> None:
    given = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item_id}]
    status, _, answer = server.post(RESPONSES, input=given)
    assert (status, answer["error"]["param"]) == (400, "input[1].id"), answer


CALL = '<tool_call>\n{"name": "shell", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def socket(server: ScriptedServer) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}{RESPONSES}", max_size=None) as connection:
        yield connection


def create(socket: ClientConnection, **body: object) -> dict[str, Any]:
    """Send a request of Codex's WebSocket mode and return the final response, or the error."""
    send(socket, **{**CODEX, **body})
    last = until_end(socket)[-1]
    answer: dict[str, Any] = last.get("response", last)
    return answer


def test_unstored_response_continues_on_the_same_socket(server: ScriptedServer, socket: ClientConnection) -> None:
    server.say("-")
    warm = create(socket, generate=False, input=CODEX["input"][:1])
    server.say(CALL)
    first = create(socket, previous_response_id=warm["id"], input=CODEX["input"][1:])
    assert first["previous_response_id"] == warm["id"] and not first["store"]
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    server.say("Done.")
    second = create(socket, previous_response_id=first["id"], input=[result])
    whole = ask(server, f"{RESPONSES}/input_tokens", input=[*CODEX["input"], call, result], tools=CODEX["tools"])
    assert second["usage"]["input_tokens"] == whole["input_tokens"]
    used = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= used - 8
    assert server.request("GET", f"{RESPONSES}/{second['id']}")[0] == 404


@pytest.mark.parametrize("place", ["previous_response_id", "conversation", "previous_item_id"])
def test_unstored_response_after_a_stored_one_keeps_the_conversation(
    server: ScriptedServer, socket: ClientConnection, place: str
) -> None:
    data = f"data:text/plain;base64,{b64encode(b'A file.' * 20).decode()}"
    file = {"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": data}]}
    server.say(CALL)
    stored = create(socket, input=[*CODEX["input"], file], instructions="Be brief.", store=True)
    (call,) = stored["output"]
    names = {"previous_response_id": stored["id"], "conversation": stored["conversation"]["id"]}
    names["previous_item_id"] = f"msg_{call['id'].split('_')[1]}"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    server.say("Done.")
    first = create(socket, **{place: names[place]}, input=[result], instructions="Be kind.")
    history = [*CODEX["input"], file, call, result, *first["output"], {"role": "user", "content": "And?"}]
    server.say("Well.")
    second = create(socket, previous_response_id=first["id"], input="And?")
    whole = ask(server, f"{RESPONSES}/input_tokens", input=history, tools=CODEX["tools"])
    assert second["usage"]["input_tokens"] == whole["input_tokens"], "the instructions are not repeated"
    history += [*second["output"], {"role": "user", "content": "So?"}]
    server.say("Yes.")
    last = create(socket, previous_response_id=second["id"], input="So?", instructions="Be kind.", store=True)
    whole = ask(server, f"{RESPONSES}/input_tokens", input=history, tools=CODEX["tools"], instructions="Be kind.")
    assert last["usage"]["input_tokens"] == whole["input_tokens"]
    assert len(last["input_item_ids"]) == len(history)


def test_unstored_messages_are_dropped_beyond_a_size_with_their_reasoning_and_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_UNSTORED_CHARS", 10_000)
    unstored = streams.UnstoredHistories()

    def record(name: str, *messages: Message) -> None:
        run: Any = SimpleNamespace(id=name, history=messages)
        unstored.record(run, None)

    record("many", *(Message(role="user", content="a") for _ in range(30)))
    record("few", Message(role="user", content="a"))
    assert list(unstored) == ["many", "few"]
    record("reasoned", Message(role="assistant", content="a", reasoning_content="b" * 5_000))
    assert list(unstored) == ["few", "reasoned"]
    record("long", Message(role="user", content="a" * 10_001))
    assert not unstored


def test_unstored_response_is_unknown_elsewhere_and_after_it_was_continued(
    server: ScriptedServer, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say("Hi.")
    first = create(socket)
    place = {"previous_response_id": first["id"], "input": "And?"}
    status, _, answer = server.post(RESPONSES, **place)
    assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")
    server.say("Well.")
    second = create(socket, **place)
    assert second["status"] == "completed"
    assert create(socket, **place)["error"]["code"] == "previous_response_not_found"
    monkeypatch.setattr(streams, "MAX_UNSTORED_CHARS", 10)
    server.say("So.")
    third = create(socket, previous_response_id=second["id"], input="And then?")
    assert third["status"] == "completed"
    last = create(socket, previous_response_id=third["id"], input="More?")
    assert last["error"]["code"] == "previous_response_not_found"


def test_final_message_is_continued(server: ScriptedServer) -> None:
    user = {"role": "user", "content": "Count."}
    server.say("One, two, three.")
    whole = ask(server, CHAT, messages=[user], return_token_ids=True)
    begun = {"role": "assistant", "content": "One, two,"}
    server.say(" three.")
    rest = ask(
        server,
        CHAT,
        messages=[user, begun],
        continue_final_message=True,
        add_generation_prompt=False,
        return_token_ids=True,
    )
    assert rest["choices"][0]["message"]["content"] == " three."
    prompt, first = rest["prompt_token_ids"], whole["prompt_token_ids"]
    assert prompt[: len(first)] == first and server.tokenizer.decode(prompt[len(first) :]) == "One, two,"
    cached = rest["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(first) - 4


CALL_JSON = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        ({"role": "user", "content": "Hi"}, {}),
        ({"role": "assistant", "content": "Hi", "tool_calls": [CALL_JSON]}, {}),
        ({"role": "assistant", "content": "Hi"}, {"add_generation_prompt": True}),
    ],
)
def test_final_message_that_cannot_be_continued_is_refused(
    server: ScriptedServer, last: dict[str, str], fields: dict[str, bool]
) -> None:
    messages = [{"role": "user", "content": "Hi"}, last]
    status, _, answer = server.post(CHAT, messages=messages, continue_final_message=True, **fields)
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


def test_compaction_trigger_yields_a_summary_that_replaces_the_history(
    server: ScriptedServer, socket: ClientConnection
) -> None:
    server.say("Hi there.")
    first = ask(server, **CODEX)
    history = [*CODEX["input"], *first["output"]]
    described = Described(server.request("GET", "/openapi.json")[2])
    for over_socket in (False, True):
        server.say("They greeted.")
        body = {**CODEX, "input": [*history, {"type": "compaction_trigger"}]}
        compacted = create(socket, **body) if over_socket else ask(server, **body)
        described.check("POST", RESPONSES, 200, compacted)
        assert (compacted["status"], compacted["store"]) == ("completed", False)
        (item,) = compacted["output"]
        assert item["type"] == "compaction" and "They greeted." not in json.dumps(compacted)
        used = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert compacted["usage"]["input_tokens_details"]["cached_tokens"] >= used - 8
    user = {"role": "user", "content": "Go on."}
    counts = [
        ask(server, f"{RESPONSES}/input_tokens", input=[given, user])["input_tokens"]
        for given in (item, {"role": "user", "content": "Summary of the conversation so far:\n\nThey greeted."})
    ]
    assert counts[0] == counts[1]


def test_compact_route_keeps_the_messages_of_the_user(server: ScriptedServer) -> None:
    server.say("Hi.")
    first = ask(server, input="Hello there.")
    server.say("A greeting.")
    status, headers, answer = server.post(
        f"{RESPONSES}/compact", previous_response_id=first["id"], input="More.", reasoning={"summary": "auto"}
    )
    assert status == 200, answer
    Described(server.request("GET", "/openapi.json")[2]).check("POST", f"{RESPONSES}/compact", 200, answer)
    *kept, compaction = answer["output"]
    assert [item["content"][0]["text"] for item in kept] == ["Hello there.", "More."]
    assert (answer["object"], compaction["type"]) == ("response.compaction", "compaction")
    assert headers["x-chatcache-ignored"] == "reasoning.summary"
    server.say("An end.")
    again = server.post(f"{RESPONSES}/compact", input=answer["output"])[2]
    assert [item["type"] for item in again["output"]] == ["message", "message", "compaction"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"type": "compaction", "encrypted_content": "gAAAA"}], "input[0].encrypted_content"),
        ([{"type": "compaction", "encrypted_content": "chatcache.?"}], "input[0].encrypted_content"),
        ([{"type": "compaction"}], "input[0].encrypted_content"),
        ([{"type": "compaction_trigger"}, {"role": "user", "content": "Hi"}], "input[0].type"),
    ],
)
def test_invalid_compaction_is_refused_by_its_field(server: ScriptedServer, given: object, param: str) -> None:
    status, _, answer = server.post(RESPONSES, input=given)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("instructions", [None, "Be brief."])
@pytest.mark.parametrize(
    ("route", "given"), [("", [{"type": "compaction_trigger"}]), ("/compact", None), ("/compact", [])]
)
def test_compaction_of_nothing_is_refused(
    server: ScriptedServer, route: str, given: object, instructions: str | None
) -> None:
    fields = {"instructions": instructions, **({} if given is None else {"input": given})}
    status, _, answer = server.post(f"{RESPONSES}{route}", **fields)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "input", "missing_required_parameter")
    assert error["message"].startswith("input is required")
    empty = server.post("/v1/conversations")[2]["id"]
    assert server.post(f"{RESPONSES}{route}", conversation=empty, **fields)[0] == 400


def test_prompt_of_a_compaction_is_counted_and_explained(server: ScriptedServer) -> None:
    server.say("Hi.")
    first = ask(server, input="Hello there.")
    given = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"type": "compaction_trigger"}]
    server.say("A greeting.")
    used = ask(server, input=given)["usage"]["input_tokens"]
    assert ask(server, f"{RESPONSES}/input_tokens", input=given)["input_tokens"] == used
    explained = ask(server, "/v1/cache/explain", input=given)
    assert (explained["prompt_tokens"], explained["cached_tokens"] > 0) == (used, True)


@pytest.mark.parametrize(
    "tool", [{"type": ["x"]}, {"type": {}}, {"type": 5}, ["x"], "x", {"type": "namespace", "tools": 5}]
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages"])
def test_invalid_tool_is_refused_by_its_field(server: ScriptedServer, path: str, tool: object) -> None:
    prompt = (
        {"input": "Hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    )
    status, _, answer = server.post(path, tools=[tool], **prompt)
    assert status == 400 and "tools[" in answer["error"]["message"], answer
