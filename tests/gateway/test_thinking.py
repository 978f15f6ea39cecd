"""Reasoning controls over HTTP: what the chat template sees, budgets, kept reasoning, and prefilled answers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.gateway.scripted import ScriptedRunner, ScriptedServer, scripted_with
from tests.gateway.serving import slowed, wait_until
from tests.tokenizer.thinking_templates import thinking_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "How many?"}]
ANSWER = "Six."
Json = dict[str, Any]
Start = Callable[[str], ScriptedServer]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start the server of a template once per module."""
    running: dict[str, ScriptedServer] = {}
    with contextlib.ExitStack() as stack:

        def begin(name: str) -> ScriptedServer:
            if name not in running:
                running[name] = stack.enter_context(
                    scripted_with(tmp_path_factory.mktemp("db"), thinking_tokenizer(name))
                )
            server = running[name]
            assert isinstance(server.runner, ScriptedRunner)
            server.runner.say([])
            return server

        yield begin
        for server in running.values():
            server.wait_idle()


def ask(server: ScriptedServer, path: str = CHAT, **fields: Any) -> tuple[Json, str | None]:
    """Send a request; return the answer and the ignored fields."""
    status, headers, answer = server.post(path, **fields)
    assert status == 200, answer
    return answer, headers.get("x-chatcache-ignored")


def prompt_of(server: ScriptedServer, messages: list[Json]) -> str:
    """Return the prompt of a chat."""
    answer, _ = ask(server, messages=messages, max_tokens=1, return_token_ids=True)
    return server.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


def prompt_end(server: ScriptedServer, **fields: Any) -> tuple[str, str | None]:
    """Return the end of the prompt that a chat with these fields has, and the ignored fields."""
    body = {"messages": USER, "max_tokens": 1, "return_token_ids": True, **fields}
    answer, ignored = ask(server, **body)
    text = server.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    return text.rpartition("assistant\n")[2], ignored


def refusal(server: ScriptedServer, path: str = CHAT, **fields: Any) -> tuple[str, str]:
    status, _, answer = server.post(path, **{"messages": USER, **fields} if path == CHAT else fields)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "fields", "end", "ignored"),
    [
        ("qwen3", {}, "", None),
        ("qwen3", {"reasoning_effort": "none"}, CLOSED, None),
        ("qwen3", {"reasoning": {"effort": "none"}}, CLOSED, None),
        ("qwen3", {"enable_thinking": False}, CLOSED, None),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, CLOSED, None),
        ("qwen3", {"chat_template_kwargs": {"thinking": False}}, CLOSED, None),
        ("qwen3", {"reasoning_effort": "low"}, "", "reasoning_effort"),
        ("qwen3", {"reasoning": {"effort": "high", "summary": "auto"}}, "", "reasoning.effort, reasoning.summary"),
        ("qwen3", {"enable_thinking": True}, "", None),
        ("qwen3.6", {}, "<think>\n", None),
        ("qwen3.6", {"enable_thinking": False}, CLOSED, None),
        ("deepseek", {}, "</think>", None),
        ("deepseek", {"reasoning_effort": "high"}, "<think>", None),
        ("deepseek", {"enable_thinking": True}, "<think>", None),
        ("deepseek", {"chat_template_kwargs": {"enable_thinking": True}}, "<think>", None),
        ("deepseek", {"reasoning_effort": "none"}, "</think>", None),
        ("r1", {"reasoning_effort": "high"}, "<think>\n", "reasoning_effort"),
        ("plain", {"reasoning_effort": "none"}, "How many?<|im_end|>", None),
        ("plain", {"reasoning_effort": "high", "enable_thinking": True}, None, "enable_thinking, reasoning_effort"),
        ("plain", {"thinking_token_budget": 9}, None, "thinking_token_budget"),
        ("plain", {"chat_template_kwargs": {"date_string": "today"}}, None, None),
        ("plain", {"chat_template_kwargs": {"zzz": 1}}, None, "chat_template_kwargs.zzz"),
    ],
)
def test_chat_reasoning_controls_reach_the_template(
    start: Start, name: str, fields: Json, end: str | None, ignored: str | None
) -> None:
    found, named = prompt_end(start(name), **fields)
    assert end is None or found.endswith(end)
    assert (found == "" or end != "") and named == ignored


def test_chat_effort_is_written_by_a_template_that_has_levels(start: Start) -> None:
    server = start("graded")
    ids = {}
    for effort in (None, "low", "high"):
        answer, ignored = ask(server, messages=USER, max_tokens=1, reasoning_effort=effort, return_token_ids=True)
        ids[effort] = answer["prompt_token_ids"]
        assert ignored is None and f"level {effort or 'medium'}" in server.tokenizer.decode(ids[effort])
    counted = server.post("/tokenize", messages=USER, reasoning_effort="high")[2]
    assert counted["tokens"] == ids["high"] != ids["low"]
    explained = server.post("/v1/cache/explain", messages=USER, reasoning_effort="high")[2]
    assert explained["prompt_tokens"] == len(ids["high"]) and explained["cached_tokens"] == len(ids["high"]) - 1


@pytest.mark.parametrize(
    ("name", "fields", "param", "words"),
    [
        ("qwen3", {"reasoning_effort": "extreme"}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max"),
        ("qwen3", {"reasoning": {"effort": "extreme"}}, "reasoning.effort", "none, minimal, low"),
        ("qwen3", {"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort", "exclude"),
        ("unmarked", {"reasoning_effort": "none"}, "reasoning_effort", "cannot switch its reasoning off"),
        ("unmarked", {"enable_thinking": False}, "enable_thinking", "cannot switch its reasoning off"),
        ("qwen3", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "set by the server"),
        ("qwen3", {"thinking_token_budget": -1}, "thinking_token_budget", "at least 0"),
        ("strict", {"chat_template_kwargs": {"reasoning_effort": "odd"}}, "chat_template_kwargs", "refuses"),
    ],
)
def test_chat_invalid_reasoning_controls_are_refused_by_name(
    start: Start, name: str, fields: Json, param: str, words: str
) -> None:
    found, message = refusal(start(name), **fields)
    assert found == param and words in message


@pytest.mark.parametrize("name", ["r1", "qwen3.6"])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.slow
def test_thinking_budget_is_kept_in_all_draws(start: Start, name: str, temperature: float) -> None:
    """200 draws over the cases, of a model that draws its tokens at random and never ends its reasoning by itself."""
    server, budget = start(name), 40
    answer, _ = ask(
        server,
        messages=USER,
        n=50,
        temperature=temperature,
        seed=3,
        max_tokens=80,
        thinking_token_budget=budget,
        ignore_eos=True,
        logit_bias={str(token): -100 for token in server.tokenizer.encode_after("a", "</think>")},
    )
    texts = [choice["message"] for choice in answer["choices"]]
    assert len(texts) == 50 and all(message["reasoning"] and message["content"] for message in texts)
    num_reasoning = [len(server.tokenizer.encode(message["reasoning"])) for message in texts]
    assert max(num_reasoning) > 8
    total = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 50 * (budget - 16) <= total <= 50 * (budget + 16)
    for seed in range(4):
        one, _ = ask(server, messages=USER, max_tokens=80, thinking_token_budget=budget, ignore_eos=True, seed=seed)
        assert 0 < one["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 16


def test_none_effort_without_a_switch_yields_no_reasoning(start: Start) -> None:
    server = start("r1")
    answer, ignored = ask(server, messages=USER, n=20, max_tokens=12, reasoning_effort="none", ignore_eos=True)
    assert ignored is None
    assert all("reasoning" not in c["message"] and c["message"]["content"] for c in answer["choices"])
    disabled = {"type": "disabled"}
    blocks, _ = ask(server, MESSAGES, messages=USER, max_tokens=12, thinking=disabled, temperature=0)
    assert [block["type"] for block in blocks["content"]] == ["text"]


@pytest.mark.parametrize(
    "fields",
    [{"beam_width": 4, "n": 2}, {"n": 3, "distinct": True, "seed": 1}, {"n": 2, "best_of": 4, "seed": 2}],
)
def test_thinking_budget_is_kept_by_every_search(start: Start, fields: Json) -> None:
    answer, _ = ask(start("r1"), messages=USER, max_tokens=40, thinking_token_budget=20, ignore_eos=True, **fields)
    assert all(choice["message"]["reasoning"] and choice["message"]["content"] for choice in answer["choices"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= len(answer["choices"]) * 36


def test_thinking_budget_precedes_a_grammar(start: Start) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer, _ = ask(
        start("r1"), messages=USER, n=4, max_tokens=60, thinking_token_budget=12, response_format=form, seed=1
    )
    for choice in answer["choices"]:
        assert json.loads(choice["message"]["content"])["a"] in (1, 2) and choice["message"]["reasoning"]


def test_chat_reasoning_that_was_cut_off_may_be_sent_back(start: Start) -> None:
    server = start("r1")
    cuts: list[Json] = [{"reasoning_content": "Let me"}, {"reasoning": "Let me", "content": None}]
    for cut in cuts:
        history = [*USER, {"role": "assistant", **cut}, {"role": "user", "content": "Go on"}]
        empty = [*USER, {"role": "assistant", **cut, "content": ""}, {"role": "user", "content": "Go on"}]
        first, second = (prompt_of(server, messages) for messages in (history, empty))
        assert first == second and "Go on" in first
    status, _, answer = server.post(CHAT, messages=[*USER, {"role": "assistant", "content": None}], max_tokens=1)
    assert (status, answer["error"]["param"]) == (400, "messages[1].content")


@pytest.mark.parametrize("included", [None, True, False])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}], ids=str)
def test_chat_reasoning_is_left_out_on_request(start: Start, more: Json, included: bool | None) -> None:
    server = start("r1")
    body = {"messages": USER, "include_reasoning": included, "max_tokens": 60, **more}
    server.say(f"Six, I think.\n</think>\n\n{ANSWER}")
    answer, ignored = ask(server, **body)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["content"] == ANSWER and ignored is None
    assert ("reasoning" in message, "reasoning_content" in message) == (included is not False,) * 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    server.say(f"Six, I think.\n</think>\n\n{ANSWER}")
    _, data = server.stream(CHAT, **body)
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
    assert any({"reasoning", "reasoning_content"} & choice["delta"].keys() for choice in choices) is (
        included is not False
    )
    if "return_token_ids" in more:
        assert (
            sum(len(choice["token_ids"]) for choice in choices if "token_ids" in choice) == usage["completion_tokens"]
        )


def test_responses_report_reasoning_and_its_controls(start: Start) -> None:
    server = start("qwen3.6")
    server.say("Let me count.</think>" + ANSWER)
    answer, ignored = ask(server, RESPONSES, input="How many?", reasoning={"effort": "low"}, thinking_token_budget=100)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me count."}]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    assert (answer["reasoning"], ignored) == ({"effort": None, "summary": None}, "reasoning.effort")
    assert answer["thinking_token_budget"] == 100 and answer["ignored"] == ["reasoning.effort"]
    counted = ask(server, "/v1/responses/input_tokens", input="How many?", enable_thinking=False)[0]
    assert counted["input_tokens"] > answer["usage"]["input_tokens"]
    server.say(ANSWER)
    quiet, _ = ask(server, RESPONSES, input="How many?", reasoning={"effort": "none"})
    assert [item["type"] for item in quiet["output"]] == ["message"] and quiet["reasoning"]["effort"] == "none"
    assert quiet["usage"]["input_tokens"] == counted["input_tokens"]


def test_responses_stream_reasoning_with_the_events_of_the_api(start: Start) -> None:
    server = start("qwen3.6")
    server.say("Let me count.</think>" + ANSWER)
    _, data = server.stream(RESPONSES, input="How many?", thinking_token_budget=100)
    kinds = [json.loads(event)["type"] for event in re.findall(rb"data: (.*)\n\n", data)]
    short = [
        kind.removeprefix("response.") for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before
    ]
    assert short[2:9] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added"),
    ]


def test_responses_send_the_reasoning_as_its_summary_on_request(start: Start) -> None:
    """While it is generated, at the end, from the store and in a list; a next turn continues it without the content."""
    server = start("qwen3.6")
    server.say("Let me count.</think>" + ANSWER)
    asked: Json = {"input": "How many?", "reasoning": {"summary": "detailed"}, "preserve_thinking": True}
    _, data = server.stream(RESPONSES, **asked)
    events = [json.loads(event) for event in re.findall(rb"data: (.*)\n\n", data)]
    by_kind = {event["type"].removeprefix("response."): event for event in events}
    assert not any(kind.startswith("reasoning_text") for kind in by_kind)
    order = [kind for kind in by_kind if kind.startswith("reasoning")]
    assert order == [
        *("reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done"),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    part = {"type": "summary_text", "text": "Let me count."}
    assert "".join(deltas) == by_kind[order[2]]["text"] == "Let me count." and by_kind[order[3]]["part"] == part
    assert {by_kind[kind]["summary_index"] for kind in order} == {0}
    response = by_kind["completed"]["response"]
    thought = response["output"][0]
    assert (thought["type"], thought["summary"], thought["content"]) == ("reasoning", [part], [])
    assert response["reasoning"] == {"effort": None, "summary": "detailed"} and "ignored" not in response
    server.gateway.responses.remove(response["id"])
    path = f"/v1/conversations/{response['conversation']['id']}/items"
    stored = server.request("GET", f"{RESPONSES}/{response['id']}")[2]["output"][0]
    listed = server.request("GET", path)[2]["data"]
    assert stored == thought and [part] in [each.get("summary") for each in listed]
    server.say(ANSWER)
    sent = [{"role": "user", "content": "How many?"}, *response["output"], {"role": "user", "content": "And then?"}]
    second, _ = ask(server, RESPONSES, **{**asked, "input": sent})
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == response["usage"]["total_tokens"] - 1


def test_running_response_has_its_summary_so_far(start: Start) -> None:
    server = start("qwen3.6")
    server.say("Let me count. " * 40)
    asked: Json = {"input": "How many?", "reasoning": {"summary": "auto"}, "background": True}
    with slowed(server, 0.02):
        created, _ = ask(server, RESPONSES, **asked, ignore_eos=True, max_output_tokens=300)

        def thought() -> Json:
            output = server.request("GET", f"{RESPONSES}/{created['id']}")[2]["output"]
            return output[0] if output else {}

        wait_until(lambda: bool(thought().get("summary")), "a part of the summary")
        running = thought()
        server.post(f"{RESPONSES}/{created['id']}/cancel")
    assert (running["status"], running["content"]) == ("in_progress", [])
    text = running["summary"][0]["text"]
    assert text and ("Let me count. " * 40).startswith(text)


def test_summary_of_a_model_without_reasoning_is_named_as_ignored(start: Start) -> None:
    answer, ignored = ask(start("plain"), RESPONSES, input="Hi", max_output_tokens=1, reasoning={"summary": "auto"})
    assert (answer["reasoning"]["summary"], ignored) == (None, "reasoning.summary")
    assert refusal(start("qwen3"), RESPONSES, input="Hi", reasoning={"summary": "long"})[0] == "reasoning.summary"


def turn(server: ScriptedServer, text: str, reply: str, **fields: Any) -> Json:
    server.say(reply)
    return ask(server, RESPONSES, input=text, **fields)[0]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.6"])
@pytest.mark.parametrize("setting", ["metadata", "field"])
def test_kept_reasoning_leaves_only_new_tokens_to_compute(start: Start, name: str, setting: str) -> None:
    server = start(name)
    thought = "Let me count them all one by one, slowly.</think>\n\nSix."
    reply = thought if name == "qwen3.6" else f"<think>\n{thought}"
    where: Json = {}
    if setting == "metadata":
        created = server.post("/v1/conversations", metadata={"preserve_thinking": "true"})[2]
        where = {"conversation": created["id"]}
    first = turn(server, f"How many {setting}?", reply, **where or {"preserve_thinking": True})
    ids = where or {"previous_response_id": first["id"]}
    second = turn(server, "And then?", reply, **ids)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1
    third = turn(server, "At last?", reply, **(where or {"previous_response_id": second["id"]}))
    assert third["usage"]["input_tokens_details"]["cached_tokens"] == second["usage"]["total_tokens"] - 1
    conversation = server.request("GET", f"/v1/conversations/{third['conversation']['id']}")[2]
    assert conversation["metadata"] == {"preserve_thinking": "true"}
    fork = turn(server, "At last?", reply, previous_response_id=second["id"], preserve_thinking=False)
    plain = turn(server, "How many?", reply)
    dropped = turn(server, "And then?", reply, previous_response_id=plain["id"])
    for other in (fork, dropped):  # as the template does
        assert other["usage"]["input_tokens"] < third["usage"]["input_tokens"]
    assert dropped["usage"]["input_tokens_details"]["cached_tokens"] < plain["usage"]["total_tokens"] - 8


@pytest.mark.parametrize("name", ["qwen3", "qwen3.6"])
def test_kept_reasoning_of_a_chat_is_found_by_the_text_of_the_answer(start: Start, name: str) -> None:
    server = start(name)
    thought = "Let me count them all, one by one.</think>\n\nSix."
    server.say(thought if name == "qwen3.6" else f"<think>\n{thought}")
    messages = [{"role": "user", "content": f"How many in {name}?"}]
    first, _ = ask(server, messages=messages, preserve_thinking=True)
    assert first["choices"][0]["message"]["content"] == ANSWER
    messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Sure?"}]
    for keeps in (True, False):
        second, _ = ask(server, messages=messages, preserve_thinking=keeps, max_tokens=1)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached == first["usage"]["total_tokens"] - 1) == keeps


def test_kept_reasoning_survives_calls_of_tools(start: Start) -> None:
    server = start("qwen3")
    call = '<tool_call>\n{"name": "count", "arguments": {"of": "x"}}\n</tool_call>'
    tools = [{"type": "function", "name": "count", "parameters": {"type": "object"}}]
    first = turn(
        server, "Count x.", f"<think>\nI need a tool.\n</think>\n\n{call}", tools=tools, preserve_thinking=True
    )
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    result = [{"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "6"}]
    server.say("<think>\nIt is six.\n</think>\n\nSix.")
    second, _ = ask(server, RESPONSES, input=result, previous_response_id=first["id"], tools=tools)
    third = turn(server, "Sure?", ANSWER, previous_response_id=second["id"], tools=tools)
    for before, after in ((first, second), (second, third)):
        assert after["usage"]["input_tokens_details"]["cached_tokens"] == before["usage"]["total_tokens"] - 1


def test_messages_thinking_controls_and_blocks(start: Start) -> None:
    server = start("qwen3.6")
    server.say("Let me count.</think>" + ANSWER)
    answer, ignored = ask(
        server, MESSAGES, messages=USER, max_tokens=90, thinking={"type": "enabled", "budget_tokens": 50}
    )
    thinking = {"type": "thinking", "thinking": "Let me count.", "signature": "chatcache"}
    assert answer["content"] == [thinking, {"type": "text", "text": ANSWER}] and ignored is None
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 3
    server.say(ANSWER)
    quiet, ignored = ask(server, MESSAGES, messages=USER, max_tokens=90, thinking={"type": "disabled"})
    assert quiet["content"] == [{"type": "text", "text": ANSWER}] and ignored is None
    _, ignored = ask(server, MESSAGES, messages=USER, max_tokens=1, output_config={"effort": "max"})
    assert ignored == "output_config.effort"
    status, _, error = server.post(MESSAGES, messages=USER, max_tokens=1, output_config={"effort": "odd"})
    assert status == 400 and "output_config.effort must be one of" in error["error"]["message"]
    back = [*USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Sure?"}]
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    plain = ask(server, f"{MESSAGES}/count_tokens", messages=back)[0]["input_tokens"]
    counted, ignored = ask(server, f"{MESSAGES}/count_tokens", messages=back, context_management=kept)
    assert counted["input_tokens"] > plain and ignored is None


def test_messages_budget_is_kept(start: Start) -> None:
    server = start("r1")
    for _ in range(5):
        answer, _ = ask(
            server, MESSAGES, messages=USER, max_tokens=70, thinking={"type": "enabled", "budget_tokens": 30}
        )
        assert answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 46


@pytest.mark.parametrize("name", ["plain", "qwen3", "qwen3.6", "deepseek"])
def test_messages_prefilled_answer_is_continued(start: Start, name: str) -> None:
    server = start(name)
    server.say(" seven, eight.")
    prefilled = [*USER, {"role": "assistant", "content": "Six,"}]
    answer, _ = ask(server, MESSAGES, messages=prefilled, max_tokens=90)
    assert answer["content"] == [{"type": "text", "text": " seven, eight."}]
    plain = ask(server, f"{MESSAGES}/count_tokens", messages=USER)[0]["input_tokens"]
    counted = ask(server, f"{MESSAGES}/count_tokens", messages=prefilled)[0]["input_tokens"]
    assert counted == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    begun = "\n</think>\n\nSix," if name == "qwen3.6" else "Six,"  # its prompt opens the reasoning
    assert counted == plain + len(server.tokenizer.encode_after("a\n", begun))


def test_chat_continued_message_follows_its_reasoning(start: Start) -> None:
    server = start("qwen3.6")
    begun = {"role": "assistant", "content": "Six,", "reasoning_content": "Let me count."}
    server.say(" seven.")
    answer, _ = ask(
        server,
        messages=[*USER, begun],
        continue_final_message=True,
        add_generation_prompt=False,
        return_token_ids=True,
    )
    text = server.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert text.endswith("assistant\n<think>\nLet me count.\n</think>\n\nSix,")
    assert answer["choices"][0]["message"]["content"] == " seven."


@pytest.mark.parametrize(
    ("name", "think", "thinks", "ignored"),
    [
        ("deepseek", True, True, None),
        ("deepseek", "high", True, None),
        ("deepseek", False, False, None),
        ("r1", False, False, None),
        ("r1", "low", True, "think"),
        ("plain", True, False, "think"),
    ],
)
def test_ollama_think_controls_the_reasoning(
    start: Start, name: str, think: bool | str, thinks: bool, ignored: str | None
) -> None:
    server = start(name)
    server.say("Let me count.</think>" + ANSWER if thinks else ANSWER)
    answer, named = ask(server, "/api/chat", messages=USER, stream=False, think=think)
    assert (answer["message"].get("thinking"), named) == ("Let me count." if thinks else None, ignored)
    assert server.post("/api/chat", messages=USER, stream=False, think="odd")[0] == 400


def test_prewarmed_prompt_and_steered_successor_have_the_controls(start: Start) -> None:
    server = start("graded")
    fields = {"input": "How many?", "reasoning": {"effort": "low"}, "thinking_token_budget": 20}
    created: list[Json] = []
    url = f"ws://127.0.0.1:{server.port}{RESPONSES}"
    with slowed(server, 0.02), connect(url, subprotocols=[Subprotocol("chatcache.v1")]) as socket:
        socket.send(json.dumps({"type": "prompt.prewarm", **fields}))
        while (frame := json.loads(socket.recv()))["type"] != "prompt.prewarmed":
            pass
        socket.send(json.dumps({"type": "response.create", "max_output_tokens": 400, "ignore_eos": True, **fields}))
        while len(created) < 2:
            event = json.loads(socket.recv())
            if event["type"] == "response.created":
                created.append(event["response"])
            elif event["type"] == "response.output_text.delta":
                steer = {"type": "response.steer", "previous_response_id": created[0]["id"], "input": "Now."}
                socket.send(json.dumps(steer))
                break
        while len(created) < 2:
            event = json.loads(socket.recv())
            created += [event["response"]] if event["type"] == "response.created" else []
    assert frame["input_tokens"] == ask(server, "/v1/responses/input_tokens", **fields)[0]["input_tokens"]
    assert created[1]["previous_response_id"] == created[0]["id"]
    assert (created[1]["reasoning"]["effort"], created[1]["thinking_token_budget"]) == ("low", 20)
