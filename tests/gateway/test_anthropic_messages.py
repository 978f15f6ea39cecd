"""Anthropic's Messages API over HTTP: blocks, events, tools, usage, errors, headers, and what is ignored by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatcache.config import ServerConfig
from chatcache.conversations.file_blocks import file_block
from chatcache.conversations.prompt import Message, Prompt
from chatcache.conversations.token_memo import ArgumentMemo
from chatcache.gateway.api.anthropic_messages import BILLING_LINE, SIGNATURE
from tests.gateway.described import Described
from tests.gateway.keyed import Keyed, keyed
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import PAGE_SIZE, Server, failing_after, tokenizer_with

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "How it is", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]
USER: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Zürich?"}]
# The arguments are not in the notation in which a JSON library writes them.
CALLS = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Z\\u00fcrich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
CACHED = {"type": "ephemeral"}


module_server = hermes_server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    headers = {"x-api-key": "unused", "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def ask(client: httpx.Client, **fields: object) -> dict[str, Any]:
    response = client.post(MESSAGES, json={"max_tokens": 300, "messages": USER, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(client: httpx.Client, **fields: object) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking their framing."""
    response = client.post(MESSAGES, json={"max_tokens": 300, "messages": USER, "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == "" and "[DONE]" not in response.text
    events: list[dict[str, Any]] = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events add up to, as the clients of the API compute it."""
    message: dict[str, Any] = events[0]["message"]
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without ids, and with the length of the prompt as its only count of it."""
    usage = message["usage"]
    num_input = sum(usage[name] for name in usage if name.endswith("input_tokens"))
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content, "usage": (num_input, usage["output_tokens"])}


def test_message_has_blocks_of_thinking_text_and_calls(client: httpx.Client, server: ScriptedServer) -> None:
    server.say(CALLS)
    message = ask(client, tools=TOOLS)
    ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2 and message["id"].startswith("msg_")
    assert message["content"] == [
        {"type": "thinking", "thinking": "I should look.", "signature": SIGNATURE},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Zürich"}},
        {"type": "tool_use", "name": "clock", "input": {}},
    ]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert 5 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


def test_stream_has_the_events_of_the_api_in_order(client: httpx.Client, server: ScriptedServer) -> None:
    server.say(CALLS)
    events = events_of(client, tools=TOOLS)
    kinds = [event["type"] for event in events]
    order = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    first = ["content_block_start", "ping", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *first, *block * 3, "message_delta", "message_stop"]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    arguments = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(arguments) == '{"city":  "Z\\u00fcrich"}{}'
    server.say(CALLS)
    assert comparable(joined(events)) == comparable(ask(client, tools=TOOLS))


def test_sent_back_calls_and_results_compute_only_new_tokens(client: httpx.Client, server: ScriptedServer) -> None:
    """Also when the arguments are sent back in another notation than the model's."""
    server.say(CALLS)
    first = ask(client, tools=TOOLS)
    calls = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "sunny"},
        {"type": "tool_result", "tool_use_id": calls[1], "content": [{"type": "text", "text": "12:00"}]},
        {"type": "text", "text": "Well?"},
    ]
    messages = [*USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    server.say("Sunny, at noon.")
    second = ask(client, tools=TOOLS, messages=messages)
    assert [block["text"] for block in second["content"]] == ["Sunny, at noon."]
    history = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    history += first["usage"]["output_tokens"]
    assert history - PAGE_SIZE <= second["usage"]["cache_read_input_tokens"] <= history
    assert (second["stop_reason"], second["usage"]["cache_creation_input_tokens"]) == ("end_turn", 0)


def test_cache_control_reports_computed_tokens_as_written(client: httpx.Client, server: ScriptedServer) -> None:
    text = "Reported as written. " * 8
    fields: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text, "cache_control": CACHED}]}]},
        {"messages": USER, "system": [{"type": "text", "text": text, "cache_control": CACHED}]},
        {"messages": USER, "tools": [{**TOOLS[0], "description": text, "cache_control": CACHED}]},
        {"messages": [{"role": "user", "content": f"{text}!"}], "cache_control": CACHED},
    ]
    for each in fields:
        server.say("Yes")
        usage = ask(client, **each)["usage"]
        count = client.post(COUNT, json=each).json()["input_tokens"]
        assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (
            0,
            count - usage["cache_read_input_tokens"],
        )
        server.say("Yes")
        again = ask(client, **each)["usage"]
        assert count - PAGE_SIZE <= again["cache_read_input_tokens"] < count
    server.say("Yes")
    plain = ask(client, messages=[{"role": "user", "content": text}])["usage"]
    assert plain["cache_creation_input_tokens"] == 0 and plain["cache_read_input_tokens"] > 0 < plain["input_tokens"]


def test_billing_line_is_left_out_of_the_prompt(client: httpx.Client, server: ScriptedServer) -> None:
    prompts = []
    for nonce in ("abc", "a much longer nonce"):
        line = f"{BILLING_LINE} cc_version=2.1; cch={nonce};"
        server.say("Yes")
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You answer in one word, always."}]
        response = client.post(MESSAGES, json={"max_tokens": 9, "messages": USER, "system": system})
        assert response.headers["x-chatcache-ignored"] == "system.x-anthropic-billing-header"
        prompts.append(response.json()["usage"])
    num_prompt = prompts[0]["input_tokens"] + prompts[0]["cache_read_input_tokens"]
    assert prompts[1]["cache_read_input_tokens"] >= num_prompt - PAGE_SIZE
    counts = {
        client.post(COUNT, json={"messages": USER, "system": system}).json()["input_tokens"]
        for system in (f"{BILLING_LINE} x=1;\nBe brief.", f"{BILLING_LINE} x=long nonce;\nBe brief.", "Be brief.")
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("replied", "fields", "reason", "sequence"),
    [
        ("Hello there.", {}, "end_turn", None),
        ("Hello there.", {"max_tokens": 3}, "max_tokens", None),
        ("Hello there.", {"stop_sequences": ["zz", " there"]}, "stop_sequence", " there"),
        (CALLS, {"tools": TOOLS}, "tool_use", None),
        (CALLS, {"tools": TOOLS, "max_tokens": 60}, "max_tokens", None),
        (CALLS, {"tools": TOOLS, "stop_sequences": ["u00fc"]}, "stop_sequence", "u00fc"),
        (CALLS, {"tools": TOOLS, "stop_sequences": ["clock"]}, "tool_use", None),
        (CALLS.rpartition("{}")[0], {"tools": TOOLS}, "end_turn", None),
    ],
)
def test_stop_reason_names_the_cause(
    client: httpx.Client,
    server: ScriptedServer,
    replied: str,
    fields: dict[str, Any],
    reason: str,
    sequence: str | None,
) -> None:
    server.say(replied)
    message = ask(client, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    if reason not in ("tool_use", "max_tokens"):
        assert all(block["input"] == {} for block in message["content"][-1:] if block["type"] == "tool_use")
    server.say(replied)
    delta = next(event for event in events_of(client, **fields) if event["type"] == "message_delta")
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("choice", "replied", "called"),
    [
        ("auto", "weather", ["weather"]),
        ("auto", None, []),
        ("any", "weather", ["weather"]),
        ("tool", "weather", ["clock"]),
        ("none", "weather", []),
    ],
)
def test_tool_choice_decides_which_tools_are_called(
    client: httpx.Client, server: ScriptedServer, choice: str, replied: str | None, called: list[str]
) -> None:
    call = f'<tool_call>\n{{"name": "{replied}", "arguments": {{}}}}\n</tool_call>'
    server.say(call if replied else "Nothing to call.")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"name": name, "input_schema": schema} for name in ("weather", "clock")]
    wanted = {"type": choice, **({"name": "clock"} if choice == "tool" else {})}
    message = ask(client, tools=tools, tool_choice=wanted)
    assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == called
    assert message["stop_reason"] == ("tool_use" if called else "end_turn")


def test_single_call_with_parallel_use_disabled(client: httpx.Client, server: ScriptedServer) -> None:
    server.say(CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(client, tools=TOOLS, tool_choice=choice)
    assert [block["type"] for block in message["content"]].count("tool_use") == 1


def test_output_format_constrains_the_text_by_its_name_or_that_of_its_beta(
    client: httpx.Client, server: ScriptedServer
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    format = {"type": "json_schema", "schema": schema}
    config = {"effort": "high", "format": format}
    for fields in (
        {"output_config": config},
        {"output_format": format},
        {"output_format": format, "output_config": {"effort": "high"}},
        {"output_format": None, "output_config": config},
    ):
        server.say("Certainly not JSON")
        message = ask(client, **fields)
        assert json.loads(message["content"][0]["text"]) == {"ok": True}
    bad = {"type": "json_schema", "schema": {"type": "thing"}}
    for refused, reason in (
        ({"output_format": format, "output_config": config}, "output_format and output_config.format exclude"),
        ({"output_format": bad}, "output_format cannot be used"),
        ({"output_config": {"format": bad}}, "output_config.format cannot be used"),
    ):
        response = client.post(MESSAGES, json={"max_tokens": 9, "messages": USER, **refused})
        assert response.status_code == 400 and reason in response.json()["error"]["message"]
    counted = client.post(COUNT, json={"messages": USER, "output_format": format})
    assert counted.status_code == 200 and "x-chatcache-ignored" not in counted.headers


def test_max_tokens_beyond_the_context_is_reduced_and_named(client: httpx.Client, server: ScriptedServer) -> None:
    for num_tokens, is_clamped in ((32_000, True), (4_090, True), (100, False)):
        server.say("Short.")
        response = client.post(MESSAGES, json={"max_tokens": num_tokens, "messages": USER})
        assert response.status_code == 200 and response.json()["stop_reason"] == "end_turn"
        assert ("x-chatcache-max-tokens" in response.headers) == is_clamped


def test_request_of_claude_code_is_accepted_and_its_ignored_fields_named(
    client: httpx.Client, server: ScriptedServer
) -> None:
    server.say(CALLS)
    body = {
        "model": "org/tiny-hash",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {**CACHED, "ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "Weather?"}]},
            {"role": "system", "content": "The user is in a hurry."},
        ],
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        "metadata": {"user_id": "x"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    response = client.post(f"{MESSAGES}?beta=true", json=body, headers={"anthropic-beta": "claude-code-20250219"})
    assert response.status_code == 200 and response.json()["stop_reason"] == "tool_use"
    assert set(response.headers["x-chatcache-ignored"].split(", ")) == {
        *("system.cache_control.ttl", "tools.web_search_20250305", "output_config.effort", "anthropic-beta"),
    }
    assert client.head("/").status_code == 200


def test_version_of_the_api_is_accepted_or_named_as_ignored(client: httpx.Client) -> None:
    for version, ignored in (("2023-06-01", None), ("2026-10-21", None), ("2031-01-01", "anthropic-version")):
        response = client.post(COUNT, json={"messages": USER}, headers={"anthropic-version": version})
        assert (response.status_code, response.headers.get("x-chatcache-ignored")) == (200, ignored)


def test_thread_is_not_held_and_continuing_it_is_refused_by_code(client: httpx.Client) -> None:
    created = client.post(COUNT, json={"messages": USER, "thread": {"type": "create"}})
    assert (created.status_code, created.headers["x-chatcache-ignored"]) == (200, "thread")
    continued = {"type": "continue", "previous_message_id": "msg_1"}
    response = client.post(MESSAGES, json={"max_tokens": 9, "messages": USER, "thread": continued})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert response.json()["error"]["details"] == {"error_code": "thread_not_found"}


def rendered(server: Server, body: dict[str, Any]) -> str:
    """Return the prompt of a message request as text."""
    counted: list[Sequence[Message]] = []
    service = server.gateway.model.service if server.gateway.model is not None else None
    assert service is not None
    prompt = service.prompt

    async def recorded(messages: Sequence[Message], *arguments: Any, **options: Any) -> Prompt:
        counted.append(messages)
        return await prompt(messages, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "prompt", recorded)
        assert server.post(COUNT, **body)[0] == 200
    return server.tokenizer.render(counted[0])


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "One"},
    {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "Three"}]},
    {"role": "system", "content": "Be quick."},
    {"role": "user", "content": "Four"},
    {"role": "assistant", "content": "Five"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": " Six"}]},
    {"role": "user", "content": "Seven"},
]


def test_consecutive_messages_of_one_role_are_one_turn(server: ScriptedServer) -> None:
    prompt = rendered(server, {"messages": TURNS})
    turns = ["user\nOne\nTwo\nThree", "system\nBe quick.", "user\nFour", "user\nSeven"]
    assert [prompt.count(f"<|im_start|>{turn}<|im_end|>") for turn in turns] == [1] * 4
    assert prompt.count("Five Six<|im_end|>") == 1


def test_late_system_message_joins_the_turn_of_the_user_if_the_template_refuses_it(tmp_path: Path) -> None:
    strict = tokenizer_with(
        "{% for m in messages %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    config = ServerConfig(db=str(tmp_path / "c.db"))
    with Server(config, load_tokenizer=lambda: strict, tokenizer=strict) as server:
        prompt = rendered(server.wait_ready(), {"system": "Be kind.", "messages": TURNS})
    user = "One\nTwo\nThree\nBe quick.\nFour"
    assert prompt == f"[system]Be kind.[user]{user}[assistant]Five Six[user]Seven[assistant]"


def test_zero_max_tokens_caches_the_prompt_without_an_answer(client: httpx.Client, server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Prewarmed. " * 9, "cache_control": CACHED}]}]
    for never_seen, asked in (("", USER), ("Never seen", messages)):
        server.say(never_seen)
        warmed = ask(client, max_tokens=0, messages=asked)
        assert (warmed["content"], warmed["stop_reason"]) == ([], "max_tokens")
        assert warmed["usage"]["output_tokens"] == 0
    assert warmed["usage"]["cache_creation_input_tokens"] > 20
    server.say("Never seen")
    events = events_of(client, max_tokens=0, messages=messages)
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    server.say("Yes")
    usage = ask(client, messages=messages)["usage"]
    assert usage["cache_read_input_tokens"] >= comparable(warmed)["usage"][0] - PAGE_SIZE


def test_count_is_the_prompt_of_the_message(client: httpx.Client, server: ScriptedServer) -> None:
    fields = {"messages": USER, "tools": TOOLS, "system": "Be kind.", "tool_choice": {"type": "auto"}}
    response = client.post(COUNT, json=fields)
    server.say("Yes")
    usage = ask(client, **fields)["usage"]
    assert response.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert response.headers["request-id"]


def test_document_of_text_is_a_file_in_the_message(server: Server) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Buy milk."}
    blocks = [{"type": "document", "source": source, "title": "notes.txt"}, {"type": "text", "text": "What?"}]
    prompt = rendered(server, {"messages": [{"role": "user", "content": blocks}]})
    assert file_block("notes.txt", "Buy milk.") + "\nWhat?" in prompt


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
USED = {"type": "tool_use", "id": "toolu_9", "name": "weather", "input": {}}
ORPHAN = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: blocks of type 'image'"),
        (
            {"messages": [{"role": "user", "content": [{**ORPHAN, "content": [IMAGE]}]}]},
            "messages[0].content[0].content[0]: blocks of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "documents are text here (type text); POST /v1/attach"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content[0].source is required"),
        ({"messages": [{"role": "user", "content": [ORPHAN]}]}, "toolu_1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "assistant", "content": [USED]}]}, "messages: the last one has a tool_use"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"temperature": 3}, "temperature must be at most 2"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences must have at most 16"),
        ({"tools": [{"name": "a b", "input_schema": SCHEMA}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]: there are two functions"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tool_choice needs tools of type function; others are not executed here",
        ),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "prompt is too long: the prompt has"),
    ],
)
def test_invalid_request_is_refused_in_the_envelope_of_the_api(
    client: httpx.Client, fields: dict[str, Any], named: str
) -> None:
    response = client.post(MESSAGES, json={"max_tokens": 9, "messages": USER, **fields})
    answer = response.json()
    assert response.status_code == 400 and answer["error"].pop("message").find(named) >= 0
    request_id = response.headers["request-id"]
    assert answer == {"type": "error", "error": {"type": "invalid_request_error"}, "request_id": request_id}
    assert response.headers["x-request-id"] == request_id


@pytest.mark.parametrize(
    ("send", "status", "kind"),
    [
        (lambda client: client.post(MESSAGES, json={"messages": USER, "model": "other"}), 404, "not_found_error"),
        (lambda client: client.post(f"{MESSAGES}/batches", json={}), 404, "not_found_error"),
        (lambda client: client.get(MESSAGES), 405, "invalid_request_error"),
        (lambda client: client.post(MESSAGES, content=b"x" * (5 << 20)), 413, "request_too_large"),
        (lambda client: client.post(MESSAGES, content=b"{}"), 415, "invalid_request_error"),
        (lambda client: client.post(MESSAGES, json={}, headers={"host": "evil.example"}), 403, "permission_error"),
    ],
)
def test_error_type_follows_the_status(
    client: httpx.Client, send: Callable[[httpx.Client], httpx.Response], status: int, kind: str
) -> None:
    response = send(client)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.json()["request_id"] == response.headers["request-id"]


def test_failure_after_the_first_event_is_an_error_event(client: httpx.Client, server: ScriptedServer) -> None:
    server.say("A rather long answer that the engine never finishes, because it fails. " * 3)
    with failing_after(server, 6):
        events = events_of(client)
    assert events[0]["type"] == "message_start" and "message_stop" not in {event["type"] for event in events}
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert events[-1]["request_id"].startswith("req_") and "secret" not in events[-1]["error"]["message"]


def test_events_and_bodies_are_as_described(client: httpx.Client, server: ScriptedServer) -> None:
    described = Described(client.get("/openapi.json").json())
    server.say(CALLS)
    described.check("POST", MESSAGES, 200, ask(client, tools=TOOLS))
    server.say(CALLS)
    for event in events_of(client, tools=TOOLS):
        described.check_event("POST", MESSAGES, event)
    for path in (MESSAGES, COUNT):
        described.check("POST", path, 400, client.post(path, json={}).json())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    path: Path = tmp_path_factory.mktemp("keys")
    with keyed(path) as found:
        yield found


def test_key_is_read_from_either_header(keys: Keyed) -> None:
    key = keys.ann.bearer["authorization"].removeprefix("Bearer ")
    body = {"max_tokens": 2, "messages": USER}
    for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
        status, got, _ = keys.server.request("POST", MESSAGES, body, headers)
        assert status == 200 and got["request-id"]
    assert keys.server.request("GET", "/v1/models", headers={"x-api-key": key})[0] == 200
    for headers in ({}, {"x-api-key": "sk-wrong"}, {"x-api-key": ""}):
        status, _, answer = keys.server.request("POST", MESSAGES, body, headers)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")


def test_argument_memo_restores_the_notation_and_no_other_value() -> None:
    memo = ArgumentMemo(max_chars=40)
    memo.remember("a", "call_1", '{"x":  1.0}')
    assert memo.recall("a", "call_1", '{"x": 1}') == '{"x":  1.0}'
    for namespace, call_id, arguments in (("b", "call_1", '{"x": 1}'), ("a", "call_2", "{}"), ("a", "call_1", "{")):
        assert memo.recall(namespace, call_id, arguments) == arguments
    assert memo.recall("a", "call_1", '{"x": 2}') == '{"x": 2}'
    memo.remember("a", "call_2", '{"text":  "' + "y" * 20 + '"}')  # evicts the first
    assert memo.recall("a", "call_1", '{"x": 1}') == '{"x": 1}'
