"""Structured outputs over HTTP: the hash model draws at random, so only constraints give form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from tests.gateway.frames import ask, receive, send, text_of
from tests.gateway.serving import Server, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Say"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def is_pet(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"kind", "legs"} and value["kind"] in ("cat", "dog") and 0 <= value["legs"] <= 9


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_plate(text: str) -> bool:
    return re.fullmatch("[A-C]{2}-[0-9]{3}", text) is not None


# what the client sends, and what the answer must be
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "regex": ({"structured_outputs": {"regex": "[A-C]{2}-[0-9]{3}"}}, is_plate),
    "choice": ({"structured_outputs": {"choice": ["yes", "no", "maybe é"]}}, {"yes", "no", "maybe é"}.__contains__),
    "json": ({"structured_outputs": {"json": SCHEMA}}, is_pet),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_pet),
    "json of listed keys": (
        {"structured_outputs": {"json": {word: SCHEMA[word] for word in SCHEMA if word != "additionalProperties"}}},
        is_pet,
    ),
    "grammar": ({"structured_outputs": {"grammar": 'start: ("ab" | "ba")~3'}}, re.compile("(ab|ba){3}").fullmatch),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}},
        is_pet,
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "n": {"n": 4, "seed": 1},
    "best_of": {"n": 2, "best_of": 4, "seed": 2},
    "distinct": {"n": 2, "distinct": True, "seed": 3},
    "beams": {"beam_width": 3, "n": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMS)
def test_chat_completions_match_the_constraint(server: Server, name: str, mode: str) -> None:
    fields, holds = FORMS[name]
    status, _, answer = server.post(CHAT, messages=USER, max_tokens=120, **fields, **MODES[mode])
    assert status == 200, answer
    texts = [choice["message"]["content"] for choice in answer["choices"] if choice.get("score") != -1e9]
    assert texts and all(holds(text) for text in texts), texts
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}


def test_json_object_format_returns_an_object(server: Server) -> None:
    """Endless ones are cut at the limit; those that end are objects."""
    body = {"messages": USER, "max_tokens": 60, "n": 16, "seed": 5, "response_format": {"type": "json_object"}}
    status, _, answer = server.post(CHAT, **body)
    assert status == 200, answer
    choices = answer["choices"]
    ended = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]
    assert all(is_object(text) for text in ended), ended
    assert all(choice["message"]["content"].lstrip().startswith("{") for choice in choices)


def test_completions_and_streams_match_the_constraint(server: Server) -> None:
    fields, holds = FORMS["json_schema"]
    (choice,) = server.post(COMPLETIONS, prompt="Say", max_tokens=120, temperature=0, **fields)[2]["choices"]
    assert holds(choice["text"])
    frames = server.stream(CHAT, messages=USER, max_tokens=120, temperature=0, **fields)[1].decode().split("\n\n")
    chunks = [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
    streamed = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert holds(streamed)


def test_responses_accept_the_flat_text_format(socket: ClientConnection) -> None:
    text = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}}
    response = ask(socket, input="Say", text=text, max_output_tokens=120, ignore_eos=False)
    assert is_pet(text_of(response))
    assert response["text"] == text
    plain = ask(socket, input="Say", text={"format": {"type": "text"}})
    assert plain["text"] == {"format": {"type": "text"}}
    plate = ask(socket, input="Say", structured_outputs={"regex": "[A-C]{2}-[0-9]{3}"}, ignore_eos=False)
    assert is_plate(text_of(plate))


def test_response_cut_off_by_a_dead_end_reports_it_as_the_reason(server: Server, socket: ClientConnection) -> None:
    fields = {
        "structured_outputs": {"regex": "[a-m]|[n-y]z"},
        "bad_words": ["z"],
        "n": 12,
        "seed": 1,
        "ignore_eos": False,
    }
    response = ask(socket, input="Say", max_output_tokens=9, **fields)
    assert {(item["finish_reason"], item["content"][0]["text"] < "n") for item in response["output"]} == {
        ("stop", True),
        ("length", False),
    }
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "constraint_dead_end"})
    stored = server.request("GET", f"/v1/responses/{response['id']}")[2]
    assert stored["incomplete_details"] == response["incomplete_details"]
    limited = ask(socket, input="Say", max_output_tokens=1, **{**fields, "structured_outputs": {"regex": "[a-y]{9}"}})
    assert limited["incomplete_details"] == {"reason": "max_output_tokens"}


LOOSE = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True},
        "path": {"type": "string", "format": "path", "enum": ["/a"]},
        "env": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": None,
            "maxProperties": 0,
        },
    },
    "required": ["tags", "path"],
}


@pytest.mark.parametrize("strict", [None, False, True])
def test_schema_with_a_keyword_that_cannot_be_enforced_is_refused_only_if_strict(
    server: Server, strict: bool | None
) -> None:
    named = {"name": "x", "schema": LOOSE, "strict": strict}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": USER, "response_format": {"type": "json_schema", "json_schema": named}},
        COMPLETIONS: {"prompt": "Say", "response_format": {"type": "json_schema", "json_schema": named}},
        "/v1/responses": {"input": "Say", "text": {"format": {"type": "json_schema", **named}}},
    }
    for path, body in bodies.items():
        status, _, answer = server.post(path, **body)
        if strict:
            assert (status, answer["error"]["code"]) == (400, "invalid_constraint"), answer
            assert "uniqueItems" in answer["error"]["message"]
        else:
            assert status == 200, answer
    del named["schema"]
    exact = {"path": LOOSE["properties"]["path"], "env": LOOSE["properties"]["env"]}  # type: ignore[index]
    named["schema"] = {"type": "object", "properties": exact, "required": ["path"]}
    status, _, answer = server.post(CHAT, max_tokens=40, **bodies[CHAT])
    assert status == 200 and json.loads(answer["choices"][0]["message"]["content"])["path"] == "/a", answer


def test_constraint_of_vllm_with_a_keyword_that_cannot_be_enforced_is_refused(server: Server) -> None:
    status, _, answer = server.post(CHAT, messages=USER, max_tokens=4, structured_outputs={"json": LOOSE})
    assert status == 400 and "uniqueItems" in answer["error"]["message"], answer


NAMED = {"name": "pet", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing_there"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "thing"}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "name": "a b"}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": {"type": "thing"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ],
)
def test_invalid_constraint_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    status, _, answer = server.post(CHAT, messages=USER, max_tokens=4, **fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert param.split(".")[0] in answer["error"]["message"], answer


def test_invalid_schema_of_a_response_is_refused_by_its_field(socket: ClientConnection) -> None:
    send(socket, input="x", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}})
    assert receive(socket)["error"]["param"] == "text"
    send(socket, input="x", text={"format": {"type": "json_schema", "name": "x"}})
    assert receive(socket)["error"]["param"] == "text.format.schema"


def events_of(server: Server, path: str, **body: object) -> list[str]:
    """Return the types of a stream's events; the code of an error in a stream of chunks."""
    frames = server.stream(path, stream=True, **body)[1].decode().split("\n\n")
    chunks = [json.loads(frame.rpartition("data: ")[2]) for frame in frames if "data: {" in frame]
    return [chunk["type"] if "type" in chunk else chunk["error"]["code"] for chunk in chunks]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("whole", (200, "constraint_dead_end")),
        ("streamed", ["response.created", "response.in_progress", "response.failed"]),
        ("background", (200, "constraint_dead_end")),
        ("chat", (400, "constraint_dead_end")),
        ("streamed chat", ["constraint_dead_end"]),
    ],
)
def test_dead_end_is_reported_alike_before_and_after_the_grammar_is_compiled(
    server: Server, kind: str, expected: object
) -> None:
    dead = {"allowed_token_ids": [300], "structured_outputs": {"regex": f"new {kind}"}}

    def outcome() -> object:
        if kind == "streamed":
            return events_of(server, "/v1/responses", input="x", **dead)
        if kind == "streamed chat":
            return events_of(server, CHAT, messages=USER, **dead)
        if kind == "chat":
            status, _, answer = server.post(CHAT, messages=USER, **dead)
            return status, answer["error"]["code"]
        status, _, answer = server.post("/v1/responses", input="x", background=kind == "background", **dead)
        path = f"/v1/responses/{answer['id']}"
        wait_until(lambda: server.request("GET", path)[2]["status"] == "failed", "the end")
        return status, server.request("GET", path)[2]["error"]["code"]

    assert outcome() == outcome() == expected
