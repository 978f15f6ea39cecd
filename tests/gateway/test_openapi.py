"""The OpenAPI document against the application: routes, request fields, real responses."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

import chatcache.gateway
from chatcache.config import ServerConfig
from chatcache.gateway.openapi import document
from chatcache.gateway.routes import OPERATIONS, ROUTES, SOCKETS
from chatcache.gateway.routing import Body, PageFiles, build_routes
from tests.gateway.described import Described
from tests.gateway.matrix import route_keys
from tests.gateway.serving import MODEL, Server
from tests.gateway.test_rest import converse

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def described(module_server: Server) -> Described:
    status, headers, answer = module_server.request("GET", "/openapi.json")
    assert status == 200 and headers["content-type"] == "application/json"
    return Described(answer)


def test_document_describes_exactly_the_served_routes(module_server: Server, described: Described) -> None:
    page = {entry.path for entry in ROUTES if isinstance(entry, PageFiles)}
    served = {key for route in module_server.app.routes for key in route_keys(route) if key[1] not in page}
    paths = described.document["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    found += [("WS", path) for path in described.document["x-websockets"]]
    assert {(method, path.replace("{id:path}", "{id}")) for method, path in served} == set(found)
    table = [(each.method, each.path) for each in OPERATIONS]
    assert len(table) == len(set(table)), "two entries of ROUTES have the same method and path"


def test_routes_of_one_path_with_two_permissions_are_refused() -> None:
    open_entry, other = (each for each in OPERATIONS if each.path == "/v1/conversations")
    with pytest.raises(ValueError, match="/v1/conversations require different permissions"):
        build_routes([replace(open_entry, permission="open"), other])


def test_literal_segment_matches_before_a_parameter_in_any_table_order() -> None:
    for entries in (ROUTES, ROUTES[::-1]):
        paths = [route.path for route in build_routes(entries)]
        for literal in ("export", "import"):
            assert paths.index(f"/v1/conversations/{literal}") < paths.index("/v1/conversations/{id}")
        assert paths.index("/v1/responses/input_tokens") < paths.index("/v1/responses/{id}")
        assert paths.index("/livez") < paths.index("/{file}")


def test_document_is_valid_openapi(described: Described) -> None:
    validate(described.document)
    assert len({each.summary for each in OPERATIONS}) == len(OPERATIONS)
    ids = [each["operationId"] for path in described.document["paths"].values() for each in path.values()]
    assert len(ids) == len(set(ids))


def test_document_behind_a_proxy_names_the_root_path_as_server(described: Described) -> None:
    """The rest is the document that is validated above."""
    behind, version = document(ROUTES, described.document["info"]["version"], "/chat"), described.document
    assert behind == {**version, "servers": [{"url": "/chat"}]}


def _structs_read() -> set[str]:
    """Names of the request structs that handlers read, from their source."""
    found: set[str] = set()
    for path in Path(chatcache.gateway.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "parse_fields":
                assert len(node.args) == 2 and isinstance(node.args[1], ast.Name), f"{path.name}:{node.lineno}"
                found.add(node.args[1].id)
    return found - {"kind"}


def test_document_describes_every_request_field_that_handlers_read(described: Described) -> None:
    bodies: list[Body] = [each.body for each in OPERATIONS if each.body is not None]
    bodies += [body for socket in SOCKETS for body in socket.messages.values()]
    queries = {each.query.__name__ for each in OPERATIONS if each.query is not None}
    in_table = {kind.__name__ for body in bodies for kind in body.kinds} | queries
    missing = _structs_read() - in_table
    assert not missing, f"read by a handler but in no Body of chatcache/gateway/routes.py: {sorted(missing)}"
    for body in bodies:
        fields = {name for kind in body.kinds for name in kind.__struct_encode_fields__}
        assert set(described.document["components"]["schemas"][body.name]["properties"]) == fields, body.name


# Requests of each stateless route that show every field their answers may have.
SHOWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    (
        "/v1/chat/completions",
        {"messages": USER, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2, "best_of": 3},
    ),
    ("/v1/chat/completions", {"messages": USER, "beam_width": 2, "n": 2, "prompt_logprobs": 1, "stop": "e"}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["Hi", [1, 2]], "echo": True, "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "Hi", "use_beam_search": True, "n": 2, "prompt_logprobs": 1}),
    ("/v1/embeddings", {"input": ["Hi", "there"], "dimensions": 3}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "Hi", "text_2": ["Hi", "there"]}),
    ("/v1/rerank", {"query": "Hi", "documents": ["there", {"text": "Hi"}], "top_n": 1}),
    ("/v1/rerank", {"query": "Hi", "documents": ["there"], "return_documents": False}),
    ("/score", {"text_1": "Hi", "text_2": "there"}),
    ("/rerank", {"query": "Hi", "documents": ["there"]}),
    ("/v2/rerank", {"query": "Hi", "documents": ["there"]}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/cache/explain", {"prompt": "Hi there"}),
    ("/v1/cache/explain", {"messages": USER}),
    ("/v1/cache/explain", {"input": "Hi"}),
]


@pytest.mark.parametrize(("path", "body"), SHOWN, ids=lambda each: str(each)[:50])
def test_stateless_routes_respond_as_described(
    server: Server, described: Described, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, **body, **({"max_tokens": 6} if "complet" in path else {}))
    described.check("POST", path, answer[0], answer[2])
    assert answer[0] == 200


STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": USER, "beam_width": 2}),
    ("/v1/completions", {"prompt": "Hi", "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "Hi", "beam_width": 2, "return_token_ids": True}),
]


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=lambda each: str(each)[:50])
def test_completion_streams_send_events_as_described(
    server: Server, described: Described, path: str, body: dict[str, Any]
) -> None:
    headers, data = server.stream(path, **body, max_tokens=6, ignore_eos=True)
    assert headers["content-type"].startswith("text/event-stream")
    events = re.findall(rb"data: (.*)\n\n", data)
    assert len(events) > 4 and events[-1] == b"[DONE]"
    for event in events[:-1]:
        described.check_event("POST", path, json.loads(event))


RESPONSES: list[dict[str, Any]] = [
    {"input": "Hi", "nobody_knows_this": 1},
    {"input": USER, "n": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "instructions": "x"},
    {"input": "Hi", "beam_width": 3, "n": 2, "store": False},
]


@pytest.mark.parametrize("body", RESPONSES, ids=lambda each: str(each)[:50])
def test_response_routes_respond_as_described(server: Server, described: Described, body: dict[str, Any]) -> None:
    path, body = "/v1/responses", {**body, "max_output_tokens": 6}
    status, _, answer = server.post(path, **body)
    described.check("POST", path, status, answer)
    assert status == 200
    events = re.findall(rb"event: (.*)\ndata: (.*)\n\n", server.stream(path, **body)[1])
    assert len(events) > 4
    for name, event in events:
        described.check_event("POST", path, json.loads(event))
        assert json.loads(event)["type"] == name.decode()
    one = f"{path}/{answer['id']}"
    known = 200 if answer["store"] else 404
    for method, url, sent in (
        ("POST", f"{path}/input_tokens", body),
        ("GET", one, None),
        ("GET", f"{one}/input_items", None),
        ("POST", f"{one}/cancel", None),
        ("DELETE", one, None),
    ):
        status, _, answer = server.request(method, url, sent)
        described.check(method, url, status, answer)
        assert status == (200 if sent else known)
    described.check("GET", one, 404, server.request("GET", one)[2])


def test_conversation_routes_respond_as_described(server: Server, described: Described) -> None:
    head = converse(server, "Hello", n=2)["conversation"]["id"]
    converse(server, "Hello again")
    paths = ["/v1/conversations", "/v1/conversations?limit=1", f"/v1/conversations/{head}"]
    items = f"/v1/conversations/{head}/items"
    one = f"{items}/{server.request('GET', paths[-1])[2]['active_leaf']}"
    for path in [*paths, items, f"{items}?branches=all", one]:
        status, _, answer = server.request("GET", path)
        described.check("GET", path, status, answer)
        assert status == 200
    for method, path, body in (
        ("POST", "/v1/conversations", {"items": USER}),
        ("POST", items, {"items": USER}),
        ("DELETE", one, None),
        ("POST", paths[-1], {"title": "x", "metadata": {"a": "b"}}),
        ("DELETE", paths[-1], None),
    ):
        status, _, answer = server.request(method, path, body)
        described.check(method, path, status, answer)
        assert status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        f"/v1/models/{MODEL}",
        "/livez",
        "/readyz",
        "/health",
        "/version",
        "/v1/cache/accounts",
        "/v1/cache/map",
        "/v1/admin",
    ],
)
def test_server_routes_respond_as_described(server: Server, described: Described, path: str) -> None:
    status, _, answer = server.request("GET", path)
    described.check("GET", path, status, answer)
    assert status == 200


def test_metrics_route_responds_with_text_as_described(server: Server, described: Described) -> None:
    status, headers, text = server.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    described.check("GET", "/metrics", status, text, "text/plain")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", {"messages": []}, 400),
        ("POST", "/v1/chat/completions", {"messages": USER, "model": "x"}, 404),
        ("POST", "/v1/conversations/x", {"rev": -1}, 400),
        ("GET", "/v1/conversations/x", None, 404),
        ("DELETE", "/v1/conversations/x", None, 404),
        ("GET", "/v1/conversations?limit=0", None, 400),
        ("GET", "/v1/models/x", None, 404),
        ("POST", "/v1/cache/explain", {}, 400),
    ],
)
def test_errors_are_as_described(
    server: Server, described: Described, method: str, path: str, body: object, status: int
) -> None:
    found, _, answer = server.request(method, path, body)
    assert found == status
    described.check(method, path, status, answer)


def test_routes_before_the_model_is_loaded_respond_as_described(tmp_path: Path) -> None:
    server = Server(ServerConfig(db=str(tmp_path / "c.db"), api_keys=("k",)))
    server.engine_gate.clear()
    with server:
        described = Described(server.request("GET", "/openapi.json")[2])
        for path in ("/readyz", "/health"):
            described.check("GET", path, 503, server.request("GET", path)[2])
        described.check("GET", "/v1/models", 401, server.request("GET", "/v1/models")[2])
        described.check("GET", "/livez", 200, server.request("GET", "/livez")[2])


def test_readyz_shows_the_load_only_with_a_key(tmp_path: Path) -> None:
    with Server(ServerConfig(db=str(tmp_path / "c.db"), api_keys=("k",))) as server:
        server.wait_ready()
        described = Described(server.request("GET", "/openapi.json")[2])
        answers = [server.request("GET", "/readyz", headers=each)[2] for each in ({}, {"authorization": "Bearer k"})]
        for answer in answers:
            described.check("GET", "/readyz", 200, answer)
        assert set(answers[1]) - set(answers[0]) == {"num_running", "num_waiting", "kv_pages", "kv_pages_in_use"}


def test_described_check_with_wrong_responses_fails(described: Described) -> None:
    """A missing field, one too many, a wrong type, an undescribed status."""
    good = {"version": "1"}
    described.check("GET", "/version", 200, good)
    for status, bad in ((200, {}), (200, {**good, "more": 1}), (200, {"version": 1}), (404, good)):
        with pytest.raises(AssertionError, match=r"described|describe it"):
            described.check("GET", "/version", status, bad)
