"""Ollama's API over HTTP: lines, counts, tools, formats, errors, and what is refused or ignored by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.described import Described
from tests.gateway.keyed import keyed
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, PAGE_SIZE, failing_after

CHAT, GENERATE = "/api/chat", "/api/generate"
USER: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Zürich?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}

module_server = hermes_server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def described(module_server: ScriptedServer) -> Described:
    return Described(module_server.request("GET", "/openapi.json")[2])


def ask(client: httpx.Client, path: str = CHAT, **fields: object) -> dict[str, Any]:
    prompt = {"prompt": "Weather in Zürich?"} if path == GENERATE else {"messages": USER}
    response = client.post(path, json={"model": MODEL, "stream": False, **prompt, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def lines_of(client: httpx.Client, path: str = CHAT, **fields: object) -> list[dict[str, Any]]:
    prompt = {"prompt": "Weather in Zürich?"} if path == GENERATE else {"messages": USER}
    response = client.post(path, json={"model": MODEL, **prompt, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n") and "\n\n" not in response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat_streams_lines_that_add_up_to_the_whole_answer(
    client: httpx.Client, server: ScriptedServer, described: Described
) -> None:
    server.say(CALLS)
    *lines, last = lines_of(client, tools=TOOLS)
    whole = ask(client, tools=TOOLS)
    for name in ("content", "thinking"):
        assert "".join(line["message"].get(name, "") for line in lines) == whole["message"][name]
    assert whole["message"]["thinking"] == "I should look." and whole["message"]["content"] == "One moment."
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    for number, call in enumerate(calls):
        assert call["function"] == whole["message"]["tool_calls"][number]["function"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Zürich"}, {}]
    assert not any(line["done"] for line in lines) and last["done"] and last["message"]["content"] == ""
    assert last["eval_count"] == whole["eval_count"] > len(lines)
    for line in (*lines, last, whole):
        described.fits(
            line,
            described.operation("POST", CHAT)["responses"]["200"]["content"]["application/x-ndjson"]["schema"],
            "line",
        )


@pytest.mark.parametrize(
    ("options", "reason"), [({"stop": ['arguments": {}']}, "stop"), ({"num_predict": -1}, "length")]
)
def test_call_that_was_cut_off_is_not_sent(
    client: httpx.Client, server: ScriptedServer, options: dict[str, Any], reason: str
) -> None:
    (ids,) = server.say(CALLS)
    if reason == "length":
        options = {"num_predict": len(ids) - 14}  # within the arguments' name of the last call
    *lines, last = lines_of(client, tools=TOOLS, options=options)
    whole = ask(client, tools=TOOLS, options=options)
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    for found in (calls, whole["message"]["tool_calls"]):
        assert [call["function"]["name"] for call in found] == ["weather"]
    assert last["done_reason"] == whole["done_reason"] == reason


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_last_line_has_counts_durations_and_reason(client: httpx.Client, server: ScriptedServer, path: str) -> None:
    server.say("One two three four five six seven eight nine ten.")
    whole = ask(client, path, options={"num_predict": 5})
    assert whole.keys() >= COUNTS and whole["done_reason"] == "length" and whole["eval_count"] == 5
    parts = sum(whole[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration"))
    assert 0 < parts == whole["total_duration"]
    again = lines_of(client, path, options={"num_predict": -1})[-1]
    assert again["done_reason"] == "stop" and again["eval_count"] > 5
    assert again["prompt_eval_count"] == whole["prompt_eval_count"]
    assert again["prompt_cached_count"] >= again["prompt_eval_count"] - PAGE_SIZE


def test_calls_and_results_without_ids_are_matched_by_name_and_order(
    client: httpx.Client, server: ScriptedServer
) -> None:
    server.say(CALLS)
    first = ask(client, tools=TOOLS)
    message = first["message"]
    message["tool_calls"] = [{"function": call["function"]} for call in message["tool_calls"]]
    results = [{"role": "tool", "tool_name": "clock", "content": "9"}, {"role": "tool", "content": "Sunny"}]
    server.say("Sunny at nine.")
    second = ask(client, tools=TOOLS, messages=[*USER, message, *results])
    assert second["message"]["content"] == "Sunny at nine."
    history = first["prompt_eval_count"] + first["eval_count"]
    assert history - PAGE_SIZE <= second["prompt_cached_count"] <= history
    wrong = client.post(CHAT, json={"messages": [*USER, {"role": "tool", "tool_name": "clock", "content": "9"}]})
    assert wrong.status_code == 400 and "no call of 'clock' precedes" in wrong.json()["error"]


def test_generate_takes_a_system_prompt_or_a_raw_prompt(client: httpx.Client, server: ScriptedServer) -> None:
    server.say("<think>\nHm.\n</think>\n\nFine.")
    answer = ask(client, GENERATE, system="Be kind.")
    assert (answer["response"], answer["thinking"]) == ("Fine.", "Hm.")
    chat = [{"role": "system", "content": "Be kind."}, *USER]
    assert ask(client, messages=chat)["prompt_eval_count"] == answer["prompt_eval_count"]
    server.say("<think>\nHm.\n</think>\n\nFine.")
    raw = ask(client, GENERATE, prompt="Once upon", raw=True, format="")
    assert raw["prompt_eval_count"] == len(server.tokenizer.encode("Once upon", add_special_tokens=True))
    assert "<think>" in raw["response"] and "thinking" not in raw


def test_format_constrains_the_answer(client: httpx.Client, server: ScriptedServer) -> None:
    server.say('{"city": "Bern"}')
    assert json.loads(ask(client, format="json")["message"]["content"]) == {"city": "Bern"}
    server.say('{"city": "Bern"}')
    assert json.loads(ask(client, GENERATE, format=SCHEMA)["response"]) == {"city": "Bern"}
    server.say('{"city": "Bern", "x": 1}')
    assert set(json.loads(ask(client, GENERATE, format=SCHEMA)["response"])) == {"city"}
    for wrong in ("xml", {"type": "nothing"}):
        refused = client.post(CHAT, json={"messages": USER, "format": wrong})
        assert refused.status_code == 400 and refused.json()["error"].startswith("format")


def test_stop_and_logprobs(client: httpx.Client, server: ScriptedServer) -> None:
    server.say("One two three.")
    answer = ask(client, options={"stop": [" two"]}, logprobs=True, top_logprobs=2)
    assert (answer["message"]["content"], answer["done_reason"]) == ("One", "stop")
    assert "".join(each["token"] for each in answer["logprobs"]).startswith("One")
    assert all(len(each["top_logprobs"]) == 2 for each in answer["logprobs"])
    lines = lines_of(client, options={"stop": [" two"]}, logprobs=True)
    assert [each["token"] for line in lines for each in line.get("logprobs", ())] == [
        each["token"] for each in answer["logprobs"]
    ]


def test_options_reach_the_engine(client: httpx.Client, server: ScriptedServer) -> None:
    server.runner.say(())  # type: ignore[attr-defined]
    greedy = [ask(client, options={"temperature": 0, "num_predict": 12})["message"] for _ in range(2)]
    seeded = [ask(client, options={"seed": seed, "num_predict": 12})["message"] for seed in (1, 1, 2)]
    few = ask(client, options={"seed": 2, "top_k": 1, "num_predict": 12})["message"]
    assert greedy[0] == greedy[1] == few and seeded[0] == seeded[1] != seeded[2]
    assert ask(client, options={"temperature": 0, "repeat_penalty": 1.9, "num_predict": 12})["message"] is not None


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_request_without_a_prompt_reports_the_model_as_loaded(client: httpx.Client, path: str) -> None:
    for body in ({}, {"messages": [], "keep_alive": 0} if path == CHAT else {"prompt": "", "keep_alive": "5m"}):
        answer = client.post(path, json={"model": f"{MODEL}:latest", **body}).json()
        assert answer["done"] and answer["done_reason"] == "load"


def test_name_of_a_function_may_have_dots(client: httpx.Client, server: ScriptedServer) -> None:
    tool = {"type": "function", "function": {"name": "files.read", "parameters": {"type": "object"}}}
    server.say('<tool_call>\n{"name": "files.read", "arguments": {"path": "/a"}}\n</tool_call>')
    (call,) = ask(client, tools=[tool])["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("files.read", {"path": "/a"})
    bad = {"type": "function", "function": {"name": "files/read"}}
    assert client.post(CHAT, json={"messages": USER, "tools": [bad]}).status_code == 400


def test_fields_without_meaning_are_named(client: httpx.Client, server: ScriptedServer) -> None:
    server.say("Yes.")
    body = {"messages": USER, "keep_alive": "5m", "options": {"num_ctx": 8192, "mirostat": 1, "seed": 1}}
    ignored = client.post(CHAT, json=body).headers["x-chatcache-ignored"]
    assert ignored.split(", ") == ["keep_alive", "options.num_ctx", "options.mirostat"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [{**USER[0], "images": ["aGk="]}]}, "messages[0].images: this server reads text only"),
        (GENERATE, {"prompt": "Hi", "images": ["aGk="]}, "images: this server reads text only"),
        (GENERATE, {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template: the model's own"),
        (GENERATE, {"prompt": "Hi", "context": [1]}, "context is not supported"),
        (GENERATE, {"prompt": "Hi", "suffix": "end"}, "suffix is not supported"),
        (CHAT, {"messages": USER, "options": {"temperature": 9}}, "options.temperature must be at most 2"),
        (CHAT, {"messages": [{"role": "pope", "content": ""}]}, "messages[0].role must be one of system"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}, "context length"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_refused_request_has_an_error_of_ollama(
    client: httpx.Client, described: Described, path: str, body: dict[str, Any], words: str
) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == 400 and words in refused.json()["error"]
    described.check("POST", path, 400, refused.json())


def test_unknown_model_and_routes_that_manage_models_are_refused_clearly(client: httpx.Client) -> None:
    unknown = client.post(CHAT, json={"model": "llama3", "messages": USER})
    assert unknown.status_code == 404 and "llama3" in unknown.json()["error"]
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("HEAD", "/api/blobs/sha256:0")):
        refused = client.request(method, path, json={"model": "llama3"})
        assert refused.status_code == 404
        assert method == "HEAD" or "one model, chosen when it starts" in refused.json()["error"]
    assert client.get("/api/nothing").json() == {"error": "no route GET /api/nothing"}
    assert "it takes POST" in client.get(CHAT).json()["error"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_any_content_type_is_accepted_except_from_pages_of_other_sites(
    client: httpx.Client, server: ScriptedServer, media_type: str | None
) -> None:
    server.say("Fine.")
    headers = {"content-type": media_type} if media_type is not None else {}
    body = json.dumps({"messages": USER, "stream": False}).encode()
    assert client.post(CHAT, content=body, headers=headers).json()["message"]["content"] == "Fine."
    stranger = client.post(CHAT, content=body, headers={**headers, "origin": "http://evil.example"})
    assert stranger.status_code == 403 and "Origin" in stranger.json()["error"]


def test_embeddings_are_those_of_the_openai_route(client: httpx.Client, described: Described) -> None:
    texts = ["Hello there", "How are you?"]
    wanted = client.post("/v1/embeddings", json={"input": texts}).json()
    answer = client.post("/api/embed", json={"model": f"{MODEL}:latest", "input": texts})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    described.check("POST", "/api/embed", 200, found)
    assert found["embeddings"] == [each["embedding"] for each in wanted["data"]]
    assert found["prompt_eval_count"] == wanted["usage"]["prompt_tokens"]
    older = client.post("/api/embeddings", json={"model": MODEL, "prompt": texts[1]}).json()
    described.check("POST", "/api/embeddings", 200, older)
    assert older["embedding"] == found["embeddings"][1]
    assert len(client.post("/api/embed", json={"input": "Hi", "dimensions": 3}).json()["embeddings"][0]) == 3


def test_text_beyond_the_context_is_shortened_unless_the_client_refuses(client: httpx.Client) -> None:
    text = "word " * 4500
    shortened = client.post("/api/embed", json={"input": text})
    assert shortened.status_code == 200 and shortened.json()["prompt_eval_count"] == 4096
    refused = client.post("/api/embed", json={"input": text, "truncate": False})
    assert refused.status_code == 400 and "maximum context length is 4096" in refused.json()["error"]


def test_think_false_prevents_reasoning_and_an_unknown_effort_is_refused(
    client: httpx.Client, server: ScriptedServer
) -> None:
    server.say("<think>\nHm.\n</think>\n\nFine.")
    assert ask(client, think=True)["message"]["thinking"] == "Hm."
    server.say("<think>\nHm.\n</think>\n\nFine.")
    assert "thinking" not in ask(client, think=False)["message"]
    refused = client.post(CHAT, json={"messages": USER, "think": "hard"})
    assert refused.status_code == 400 and refused.json()["error"].startswith("think must be one of")


def test_last_message_of_the_assistant_is_continued(client: httpx.Client, server: ScriptedServer) -> None:
    server.say(" tower.")
    begun = {"role": "assistant", "content": "A lighthouse is a"}
    continued = ask(client, messages=[*USER, begun])
    assert continued["message"]["content"] == " tower."
    server.say(" tower.")
    plain = ask(client)
    assert continued["prompt_eval_count"] > plain["prompt_eval_count"]


def test_error_during_a_stream_is_its_last_line(client: httpx.Client, server: ScriptedServer) -> None:
    server.say("One two three four five six seven eight.")
    with failing_after(server, 4):
        lines = lines_of(client)
    assert lines[0]["message"]["content"] and list(lines[-1]) == ["error"]
    server.wait_idle()


def test_server_routes_respond_as_described(client: httpx.Client, described: Described) -> None:
    for method, path in (("GET", "/api/tags"), ("GET", "/api/ps"), ("GET", "/api/version"), ("POST", "/api/show")):
        answer = client.request(method, path, json={"model": MODEL} if method == "POST" else None)
        described.check(method, path, answer.status_code, answer.json())
    shown = client.post("/api/show", json={"name": MODEL}).json()
    assert shown["model_info"]["chatcache.context_length"] == 4096
    assert shown["capabilities"] == ["completion", "embedding", "tools", "thinking"] and "tools" in shown["template"]
    assert client.get("/api/tags").json()["models"][0]["name"] == MODEL


def test_root_responds_to_clients_that_look_for_a_server(client: httpx.Client) -> None:
    assert client.head("/").status_code == client.get("/").status_code == 200
    assert client.head("/api/version").status_code == 200


def test_keys_and_tenants_apply(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "zebra " * 40}]
    body = {"messages": chat, "stream": False, "options": {"num_predict": 1}}
    with keyed(tmp_path) as keys:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            status, _, answer = keys.server.request("POST", CHAT, body, headers)
            assert status == 401 and list(answer) == ["error"]
            assert keys.server.request("POST", "/api/pull", body, headers)[0] == 401
        cached = [
            keys.server.request("POST", CHAT, body, key.bearer)[2]["prompt_cached_count"]
            for key in (keys.ann, keys.ann, keys.other)
        ]
        assert cached[0] == cached[2] == 0 < cached[1]
