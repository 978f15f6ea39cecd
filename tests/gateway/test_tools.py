"""Tool calls and reasoning: candidates, truncation, forks, templates, model families."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.gateway.described import Described
from tests.gateway.frames import send, until_end
from tests.gateway.scripted import ScriptedServer, scripted
from tests.gateway.serving import PAGE_SIZE
from tests.tokenizer import oracles as oracle

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
FLAT = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"in": "x"}}\n</tool_call>'
Start = Callable[..., ScriptedServer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """One server per family and flags, shared by the module."""
    running: dict[str, ScriptedServer] = {}
    contexts = []

    def start(family: str, **config: str) -> ScriptedServer:
        key = f"{family}{config}"
        if key not in running:
            context = scripted(tmp_path_factory.mktemp("db"), family, **config)
            running[key] = context.__enter__()
            contexts.append(context)
        return running[key]

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture
def start(servers: Start) -> Iterator[Start]:
    used: list[ScriptedServer] = []

    def begin(family: str, **config: str) -> ScriptedServer:
        used.append(servers(family, **config))
        return used[-1]

    yield begin
    for server in used:
        server.wait_idle()


def chunks(server: ScriptedServer, **body: object) -> list[dict[str, Any]]:
    _, data = server.stream(CHAT, messages=USER, **body)
    events = re.findall(rb"data: (.*)\n\n", data)
    assert events[-1] == b"[DONE]"
    return [json.loads(event) for event in events[:-1]]


def events_of(server: ScriptedServer, **body: object) -> list[dict[str, Any]]:
    _, data = server.stream(RESPONSES, input="Weather?", **body)
    return [json.loads(event) for event in re.findall(rb"data: (.*)\n\n", data)]


def ask(server: ScriptedServer, path: str = RESPONSES, **body: object) -> dict[str, Any]:
    status, _, answer = server.post(path, **body)
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


def test_streamed_candidates_have_separate_calls(start: Start) -> None:
    server = start("hermes")
    server.say(f"<think>a</think>Look.\n{CALL}\n{CALL}", "No need.", f"{CALL}")
    got = chunks(server, n=3, tools=TOOLS, max_tokens=200, stream_options={"include_usage": True})
    firsts = [chunk["choices"][0] for chunk in got[:3]]
    assert [(c["index"], c["delta"]) for c in firsts] == [(k, {"role": "assistant", "content": ""}) for k in range(3)]
    text: dict[int, str] = defaultdict(str)
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    finishes: dict[int, str] = {}
    for chunk in got[3:-1]:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        text[choice["index"]] += delta.get("content", "")
        assert "<" not in delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            at = choice["index"], part["index"]
            if "id" in part:
                assert part["type"] == "function" and part["function"]["name"] == "weather" and at not in calls
                calls[at] = {"id": part["id"], "arguments": ""}
            calls[at]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"] is not None:
            finishes[choice["index"]] = choice["finish_reason"]
    assert dict(text) == {0: "Look.", 1: "No need.", 2: ""}
    assert finishes == {0: "tool_calls", 1: "stop", 2: "tool_calls"}
    assert {at: call["arguments"] for at, call in calls.items()} == dict.fromkeys(
        [(0, 0), (0, 1), (2, 0)], '{"in": "x"}'
    )
    assert len({call["id"] for call in calls.values()}) == 3
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_items_name_their_candidate(start: Start) -> None:
    server = start("hermes")
    server.say(f"<think>hm</think>Look.\n{CALL}", "No need.")
    events = events_of(server, n=2, tools=FLAT, max_output_tokens=200)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert {(item["type"], item["candidate"]) for item in response["output"]} == {
        *[("reasoning", 0), ("message", 0), ("function_call", 0), ("message", 1)]
    }
    added = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.added"}
    done = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
    assert sorted(added) == sorted(done) == list(range(4))
    assert [done[index] for index in range(4)] == response["output"]
    for index, item in added.items():
        assert item["status"] == "in_progress"
        assert {item[name] for name in ("id", "type", "candidate")} == {
            done[index][name] for name in ("id", "type", "candidate")
        }
    assert ask_stored(server, response["id"])["output"] == response["output"]


def test_stored_output_items_keep_the_order_in_which_they_began(start: Start) -> None:
    server = start("hermes")
    server.say(f"<think>hm</think>{CALL}\nNow wait.\n{CALL}", "One.", f"{CALL}\nWait.")
    for n in (1, 3):
        response = ask(server, input="Weather?", n=n, tools=FLAT, max_output_tokens=200)
        kinds = [item["type"] for item in response["output"] if item["candidate"] == 0]
        assert kinds == ["reasoning", "function_call", "message", "function_call"]
        path = f"/v1/conversations/{response['conversation']['id']}/items?order=asc"
        listed = server.request("GET", path)[2]["data"][1:]
        assert [item["id"] for item in listed] == [i["id"] for i in response["output"] if i["candidate"] == 0]
        assert ask_stored(server, response["id"])["output"] == response["output"]
        address = f"/v1/conversations/{response['conversation']['id']}"
        exported = server.request("GET", f"{address}/export")[2]
        assert server.request("DELETE", address)[0] == 200
        (imported,) = server.request("POST", "/v1/conversations/import", exported)[2]["data"]
        assert imported["status"] == "created" and imported["token_exact"]


def ask_stored(server: ScriptedServer, response_id: str) -> dict[str, Any]:
    server.gateway.responses.remove(response_id)  # as when its log is gone
    status, _, answer = server.request("GET", f"{RESPONSES}/{response_id}")
    assert status == 200
    result: dict[str, Any] = answer
    return result


@pytest.mark.parametrize("num_tokens", [1, 8, 20, 34, 40])
def test_truncated_reply_keeps_its_reasoning_and_calls(start: Start, num_tokens: int) -> None:
    server = start("hermes")
    whole = f"<think>hm</think>Look.\n{CALL}"
    (ids,) = server.say(whole)
    thought, rest = oracle.reasoning(server.tokenizer.decode(ids[:num_tokens], skip_special_tokens=False), False)
    text, calls = oracle.hermes(rest)
    answer = ask(server, CHAT, messages=USER, tools=TOOLS, max_tokens=num_tokens)
    choice = answer["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "length" and len(ids) > num_tokens
    assert (message.get("reasoning", ""), message["content"] or "") == (thought, text)
    found = [call["function"] for call in message.get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in found] == [tuple(call) for call in calls]
    server.say(whole)
    response = ask(server, input="Weather?", tools=FLAT, max_output_tokens=num_tokens)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    last = response["output"][-1]
    is_whole = last["type"] == "function_call" and last["arguments"] == '{"in": "x"}'
    assert last["status"] == ("completed" if is_whole else "incomplete") and last["type"] != "reasoning"


@pytest.mark.parametrize("cut", ["stop string", "stop token", "end token"])
@pytest.mark.parametrize("before", ["", f"{CALL}\n"])
def test_call_that_was_cut_off_is_not_a_finished_call(start: Start, cut: str, before: str) -> None:
    server = start("hermes")
    written = f"Look.\n{before}{CALL.replace('x', '7')}"
    seven = server.tokenizer.encode_after("", "7")[0]
    cuts: dict[str, dict[str, Any]] = {"stop string": {"stop": ["7"]}, "stop token": {"stop_token_ids": [seven]}}
    fields = cuts.get(cut, {})

    def say() -> None:
        (ids,) = server.say(written.partition("7")[0] if cut == "end token" else written)
        assert ids.count(seven) == (cut != "end token")

    say()
    choice = ask(server, CHAT, messages=USER, tools=TOOLS, max_tokens=200, **fields)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "Look."
    assert len(calls) == (2 if before else 1)
    assert calls[-1]["function"]["arguments"] == '{"in": "'
    say()
    got = chunks(server, tools=TOOLS, max_tokens=200, **fields)
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    parts = [part for chunk in got for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    for number, call in enumerate(calls):
        streamed = "".join(part["function"]["arguments"] for part in parts if part["index"] == number)
        assert streamed == call["function"]["arguments"]
    say()
    events = events_of(server, tools=FLAT, max_output_tokens=200, **fields)
    response = events[-1]["response"]
    statuses = ["completed", "incomplete"] if before else ["incomplete"]
    assert response["status"] == "completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for output in (response["output"], done, ask_stored(server, response["id"])["output"]):
        found = [item for item in output if item["type"] == "function_call"]
        assert [item["status"] for item in found] == statuses
        assert [item["status"] for item in output if item["type"] == "message"] == ["completed"]


def test_fork_inside_a_call_keeps_the_tokens_before_it(start: Start) -> None:
    server = start("hermes")
    (ids,) = server.say(f"Look.\n{CALL}")
    first = ask(server, input="Weather?", tools=FLAT, max_output_tokens=200)
    item = next(item for item in first["output"] if item["type"] == "message")
    at = len(ids) - 12
    server.say(server.tokenizer.decode(ids[at:], skip_special_tokens=False).replace("x", "y"))
    second = ask(server, previous_item_id=item["id"], fork_at=at, max_output_tokens=200)
    (call,) = [item for item in second["output"] if item["type"] == "function_call"]
    assert call["name"] == "weather" and json.loads(call["arguments"]) == {"in": "y"}
    assert [item["type"] for item in second["output"]] == ["message", "function_call"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= second["usage"]["input_tokens"] - PAGE_SIZE


def test_changed_tools_change_the_prompt(start: Start) -> None:
    server = start("hermes")
    server.say("Hello")
    first = ask(server, input="Hi", tools=FLAT, max_output_tokens=50)
    other = [{**FLAT[0], "name": "clock"}]
    for tools in (other, []):
        server.say("Hello")
        second = ask(server, previous_response_id=first["id"], input="And?", tools=tools, max_output_tokens=50)
        fresh = ask(server, "/tokenize", tools=tools, messages=[
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And?"}])  # fmt: skip
        assert second["usage"]["input_tokens"] == fresh["count"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] < first["usage"]["input_tokens"] - PAGE_SIZE


def test_explanation_names_a_template_that_drops_reasoning(start: Start) -> None:
    server = start("qwen3")
    server.say("<think>\nLong thoughts about it.\n</think>\n\nHello")
    first = ask(server, input="Hi", max_output_tokens=100)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
    received = ask(server, "/v1/cache/explain", previous_response_id=first["id"], input="And?")
    assert received["divergence"]["reason"] == "template_changed" and received["divergence"]["message"] == 1
    at = received["divergence"]["at_token"]
    assert at == first["usage"]["input_tokens"] and received["divergence"]["text"].startswith("Hello")
    assert received["miss"]["reason"] == "template_changed" and at - PAGE_SIZE < received["miss"]["at_token"] <= at
    assert "<think>" in received["miss"]["cached_text"]
    url, v1 = f"ws://127.0.0.1:{server.port}/v1/responses", Subprotocol("chatcache.v1")
    with connect(url, subprotocols=[v1]) as page:  # an extended client gets the same reason in a frame
        send(page, input="And?", previous_response_id=first["id"], explain=True)
        decode = next(frame for frame in until_end(page) if frame.get("phase") == "decode")
    assert decode["miss"] == {name: received["miss"][name] for name in ("reason", "at_token", "detail")}
    hermes = start("hermes")
    hermes.say("<think>\nThoughts.\n</think>\n\nHello")
    first = ask(hermes, input="Hi", max_output_tokens=100)
    received = ask(hermes, "/v1/cache/explain", previous_response_id=first["id"], input="And?")
    assert received["divergence"] is None and received["miss"]["reason"] != "template_changed"
    assert received["cached_tokens"] >= first["usage"]["total_tokens"] - PAGE_SIZE


def test_template_that_opens_reasoning_starts_the_reply_in_it(start: Start) -> None:
    server = start("opened")
    server.say(f"So it is.\n</think>\n\n{CALL}")
    first = ask(server, input="Weather?", tools=FLAT, max_output_tokens=200)
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    assert first["output"][0]["content"][0]["text"] == "So it is."
    server.say("Fine.\n</think>\n\nSunny.")
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "sunny"}
    second = ask(server, previous_response_id=first["id"], input=[output], tools=FLAT)
    assert second["output"][-1]["content"][0]["text"] == "Sunny."
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - PAGE_SIZE
    schema = {
        "type": "object",
        "properties": {"ok": {"const": True}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    server.say('I see.</think>{"ok": true}')
    reply_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(server, CHAT, messages=USER, response_format=reply_format, max_tokens=100)["choices"][0]["message"]
    assert (answer["reasoning_content"], answer["content"]) == ("I see.", '{"ok": true}')
    server.say("abc")
    message = ask(server, CHAT, messages=USER, structured_outputs={"regex": "abc"})["choices"][0]["message"]
    assert (message["content"], "reasoning" in message) == ("abc", False)  # a form of its own: nothing is thought


@pytest.mark.parametrize(
    ("family", "replied", "arguments"),
    [
        ("llama3", '{"name": "weather", "parameters": {"in":  "x"}}', '{"in":  "x"}'),
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"in": "x"}}', '{"in": "x"}'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"in": "x"}}]', '{"in": "x"}'),
        ("mistral named", '[TOOL_CALLS]weather[ARGS]{"in": "x"}', '{"in": "x"}'),
    ],
)
def test_calls_of_other_model_families_are_parsed(start: Start, family: str, replied: str, arguments: str) -> None:
    server = start(family)
    server.say(replied)
    choice = ask(server, CHAT, messages=USER, tools=TOOLS, max_tokens=100)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", arguments)
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    if "mistral" in family:
        assert re.fullmatch("[a-zA-Z0-9]{9}", call["id"])
    server.say("Sunny.")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    answer = ask(server, CHAT, messages=[*USER, choice["message"], result], tools=TOOLS, max_tokens=30)
    assert answer["choices"][0]["message"]["content"] == "Sunny."
    server.say(replied)  # it may not
    none = ask(server, CHAT, messages=USER, tools=TOOLS, tool_choice="none", max_tokens=100)["choices"][0]["message"]
    assert "tool_calls" not in none and "weather" in none["content"]
    server.say("Let me see.")  # it must
    must = ask(server, CHAT, messages=USER, tools=TOOLS, tool_choice="required", max_tokens=300, seed=1)["choices"][0]
    assert must["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_strict_function_arguments_match_their_schema_with_auto_choice(start: Start) -> None:
    server = start("hermes")
    schema = {"type": "object", "properties": {"in": {"const": "y"}}, "required": ["in"], "additionalProperties": False}
    strict = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    server.say(f"Let me see.\n{CALL}")
    choice = ask(server, CHAT, messages=USER, tools=strict, max_tokens=200)["choices"][0]
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"in": "y"}
    server.say("Nothing to look up.")
    assert ask(server, CHAT, messages=USER, tools=strict, max_tokens=200)["choices"][0]["finish_reason"] == "stop"
    server.say(f"{CALL}\n{CALL}")
    one = ask(server, CHAT, messages=USER, tools=TOOLS, parallel_tool_calls=False, max_tokens=200)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1 and one["finish_reason"] == "tool_calls"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "weather"}}]}}  # fmt: skip
    clock = {"type": "function", "function": {"name": "clock"}}
    server.say(CALL.replace("weather", "clock"))
    held = ask(server, CHAT, messages=USER, tools=[*TOOLS, clock], tool_choice=allowed, max_tokens=300, seed=2)
    assert {call["function"]["name"] for call in held["choices"][0]["message"]["tool_calls"]} == {"weather"}


MCP = {"type": "mcp", "server_label": "wiki", "server_url": "https://wiki.test/mcp"}
IMAGE = {"type": "image_generation"}
NAMED = {"type": "function", "name": "weather"}


def test_allowed_tools_that_are_not_executed_are_skipped_and_named(start: Start) -> None:
    server = start("hermes")

    def create(tools: list[Any], mode: str, *names: Any) -> tuple[int, Any]:
        server.say(CALL)
        choice = {"type": "allowed_tools", "mode": mode, "tools": [*names]}
        fields = {"tools": tools, "tool_choice": choice, "max_output_tokens": 200}
        status, _, answer = server.post(RESPONSES, input="Weather?", **fields)
        return status, answer

    label = {"type": "mcp", "server_label": "wiki"}
    for mode in ("auto", "required"):
        status, answer = create([*FLAT, MCP, IMAGE], mode, label, NAMED, IMAGE)
        assert status == 200 and answer["output"][-1]["type"] == "function_call", answer
        skipped = {"mcp", "image_generation"}
        assert set(answer["ignored"]) == {
            f"{path}.{kind}" for path in ("tools", "tool_choice.tools") for kind in skipped
        }
        assert answer["tool_choice"]["mode"] == mode
    for tools in ([*FLAT, MCP], [MCP]):
        status, answer = create(tools, "auto", label)
        assert status == 200 and [item["type"] for item in answer["output"]] == ["message"], answer
        status, answer = create(tools, "required", label)
        assert (status, answer["error"]["param"]) == (400, "tool_choice"), answer
        assert "needs tools of type function" in answer["error"]["message"]
    status, answer = create([MCP], "auto", NAMED)
    assert (status, answer["error"]["param"]) == (400, "tool_choice"), answer


def test_schema_of_a_function_is_relaxed_unless_it_is_strict(start: Start) -> None:
    """As of zod and Pydantic: `z.record`, `set[str]`, and null for keywords that are not set."""
    server = start("hermes")
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}
    words = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    names = {"format": {"type": "string", "format": "path"}, "propertyNames": record, "words": words}
    schema = {"type": "object", "properties": names, "required": [*names]}
    arguments = {"format": "/a", "propertyNames": {"b": "c"}, "words": ["d"]}
    for function, expected in (
        ({"parameters": schema}, arguments),
        ({"parameters": {"type": None, "properties": None, "required": None}}, {}),
        ({"parameters": {**schema, "properties": {**names, "words": {**words, "uniqueItems": None}}}}, arguments),
    ):
        server.say(f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': expected})}\n</tool_call>")
        tools = [{"type": "function", "function": {"name": "weather", **function}}]
        answer = ask(server, CHAT, messages=USER, tools=tools, tool_choice="required", max_tokens=200)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == expected
    strict = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    status, _, answer = server.post(CHAT, messages=USER, tools=strict, max_tokens=200)
    assert status == 400 and "uniqueItems" in answer["error"]["message"], answer


def test_logprobs_cover_the_shown_text_only(start: Start) -> None:
    server = start("hermes")
    server.say(f"<think>hm</think>Look there.\n{CALL}")
    include = ["message.output_text.logprobs"]
    response = ask(server, input="Weather?", tools=FLAT, max_output_tokens=200, include=include)
    message = next(item for item in response["output"] if item["type"] == "message")
    shown = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert "Look there." in shown and "hm" not in shown and "weather" not in shown


def test_parser_flags_override_the_chat_template(start: Start) -> None:
    server = start("hermes", tool_call_parser="none", reasoning_parser="none")
    server.say("<think>hm</think>Hi")
    answer = ask(server, CHAT, messages=USER, max_tokens=50)["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": "<think>hm</think>Hi", "refusal": None}
    status, _, refusal = server.post(CHAT, messages=USER, tools=TOOLS)
    assert (status, refusal["error"]["param"]) == (400, "tools") and "--tool-call-parser" in refusal["error"]["message"]
    server.say("Hi")
    assert ask(server, CHAT, messages=USER, tools=TOOLS, tool_choice="none")["choices"][0]["message"]["content"] == "Hi"
    always = start("hermes", reasoning_parser="deepseek_r1")
    always.say("hm</think>Hi")
    answer = ask(always, CHAT, messages=USER, max_tokens=50)["choices"][0]["message"]
    assert (answer["content"], answer["reasoning"]) == ("Hi", "hm")


def test_responses_with_calls_are_as_described(start: Start) -> None:
    server = start("hermes")
    described = Described(server.request("GET", "/openapi.json")[2])
    whole = f"<think>hm</think>Look.\n{CALL}"
    server.say(whole)
    status, _, answer = server.post(CHAT, messages=USER, tools=TOOLS, max_tokens=200)
    described.check("POST", CHAT, status, answer)
    server.say(whole)
    for chunk in chunks(server, tools=TOOLS, max_tokens=200):
        described.check_event("POST", CHAT, chunk)
    server.say(whole)
    for event in (events := events_of(server, tools=FLAT, max_output_tokens=200, parallel_tool_calls=True)):
        described.check_event("POST", RESPONSES, event)
    response = events[-1]["response"]
    described.check("POST", RESPONSES, 200, response)
    assert response["tools"][0]["name"] == "weather" and response["tool_choice"] == "auto"
    output = {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "sunny"}
    server.say("Sunny.")
    ask(server, previous_response_id=response["id"], input=[output], tools=FLAT)
    items = f"/v1/conversations/{response['conversation']['id']}/items"
    for path in (items, f"{items}?branches=all"):
        status, _, answer = server.request("GET", path)
        described.check("GET", path, status, answer)
    received = ask(server, "/v1/cache/explain", previous_response_id=response["id"], input=[output], tools=FLAT)
    described.check("POST", "/v1/cache/explain", 200, received)
    assert (
        ask(server, "/tokenize", messages=USER, tools=TOOLS)["count"] > ask(server, "/tokenize", messages=USER)["count"]
    )


@pytest.mark.parametrize("family", ["llama3", "mistral named"])
@pytest.mark.parametrize(
    "mode", [{"beam_width": 3, "n": 2}, {"n": 2, "distinct": True, "seed": 1}, {"best_of": 3, "seed": 2}], ids=str
)
def test_required_call_works_with_every_decoding_mode(start: Start, family: str, mode: dict[str, Any]) -> None:
    server = start(family)
    server.say("Well")  # then the hash model draws from the allowed tokens
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    fixed = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    choices = ask(server, CHAT, messages=USER, **fixed, **mode)["choices"]
    assert len(choices) == mode.get("n", 1)
    for choice in choices:
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert set(json.loads(call["function"]["arguments"])) == {"n"} and call["function"]["name"] == "weather"
