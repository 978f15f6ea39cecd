"""The permission matrix: every route and every WebSocket message, called with every kind of credentials.

All data belongs to the user `ann`. `violations` requests it with all other credentials and lists wrong responses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from chatcache.gateway.auth.principal import session_cookie_value
from chatcache.gateway.routing import MethodDispatcher, ProtectedRoute
from tests.gateway.keyed import Headers, Held, Keyed
from tests.gateway.serving import MODEL

# open: all clients. key: clients with a key, without ann's data. bearer: the same, but not with a session.
# owner: only ann; others get 404. admin: admin keys.
# tenant: clients with a key, each with the objects of its tenant, as `test_prompts` checks.
Allowed = Literal["open", "key", "bearer", "owner", "admin", "tenant"]
RouteKey = tuple[str, str]

SECRET = "zebra code 7131"
STRANGERS = ("bob", "other", "admin")
REFUSED = ("no key", "revoked", "revoked session", "unknown")


@dataclass(frozen=True)
class Scene:
    """A conversation of ann's."""

    conversation: str
    response: str
    asked: str
    answered: str

    def fill(self, text: str) -> str:
        """Replace the names in angle brackets by ann's ids."""
        for name, value in vars(self).items():
            text = text.replace(f"<{name}>", value)
        return text


ABSENT = Scene(*(f"{kind}_{'0' * 28}" for kind in ("conv", "resp", "msg", "msg")))


@dataclass(frozen=True)
class Call:
    """One call and its allowed clients. Ids of the scene are written `<response>` and so on."""

    allowed: Allowed
    path: str
    body: object = None
    raw: bytes | None = None


def owner(path: str, body: object = None) -> Call:
    return Call("owner", path, body)


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
_OLLAMA: dict[str, Any] = {"stream": False, "options": {"num_predict": 1}}
_NEXT = {"input": "Hi", "max_output_tokens": 1}
_CONV, _ITEM = "/v1/conversations/<conversation>", "/v1/conversations/<conversation>/items/<answered>"
_RESP = "/v1/responses/<response>"
_CONTINUATIONS: tuple[dict[str, object], ...] = (
    {"previous_response_id": "<response>"},
    {"conversation": "<conversation>"},
    {"previous_item_id": "<answered>"},
    {"previous_item_id": "<answered>", "fork_at": 1},
)

CALLS: Mapping[RouteKey, Sequence[Call]] = {
    ("GET", "/"): [Call("open", "/")],
    ("GET", "/assets"): [Call("open", "/assets/none.js")],
    ("GET", "/{file}"): [Call("open", "/none.svg")],
    ("GET", "/livez"): [Call("open", "/livez")],
    ("GET", "/readyz"): [Call("open", "/readyz")],
    ("GET", "/health"): [Call("open", "/health")],
    ("GET", "/version"): [Call("open", "/version")],
    ("GET", "/openapi.json"): [Call("open", "/openapi.json")],
    ("GET", "/metrics"): [Call("admin", "/metrics")],
    ("GET", "/v1/session"): [Call("key", "/v1/session")],
    ("POST", "/v1/session"): [Call("bearer", "/v1/session")],
    ("DELETE", "/v1/session"): [Call("open", "/v1/session")],
    ("POST", "/tokenize"): [Call("key", "/tokenize", {"prompt": "Hi"})],
    ("POST", "/detokenize"): [Call("key", "/detokenize", {"tokens": [1]})],
    ("GET", "/v1/models"): [Call("key", "/v1/models")],
    ("GET", "/v1/models/{id:path}"): [Call("key", f"/v1/models/{MODEL}")],
    ("POST", "/v1/chat/completions"): [Call("key", "/v1/chat/completions", _CHAT)],
    ("POST", "/v1/completions"): [Call("key", "/v1/completions", {"prompt": "Hi", "max_tokens": 1})],
    ("POST", "/v1/embeddings"): [Call("key", "/v1/embeddings", {"input": "Hi"})],
    **{("POST", path): [Call("key", path, {"text_1": "Hi", "text_2": "Ho"})] for path in ("/v1/score", "/score")},
    **{
        ("POST", path): [Call("key", path, {"query": "Hi", "documents": ["Ho"]})]
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    ("POST", "/v1/messages"): [Call("key", "/v1/messages", _CHAT)],
    ("POST", "/v1/messages/count_tokens"): [Call("key", "/v1/messages/count_tokens", _CHAT)],
    ("POST", "/api/chat"): [Call("key", "/api/chat", {**_OLLAMA, "messages": _CHAT["messages"]})],
    ("POST", "/api/generate"): [Call("key", "/api/generate", {**_OLLAMA, "prompt": "Hi"})],
    ("POST", "/api/embed"): [Call("key", "/api/embed", {"input": "Hi"})],
    ("POST", "/api/embeddings"): [Call("key", "/api/embeddings", {"prompt": "Hi"})],
    ("GET", "/api/tags"): [Call("key", "/api/tags")],
    ("GET", "/api/ps"): [Call("key", "/api/ps")],
    ("POST", "/api/show"): [Call("key", "/api/show", {"model": MODEL})],
    ("GET", "/api/version"): [Call("open", "/api/version")],
    ("POST", "/v1/responses"): [
        Call("key", "/v1/responses", _NEXT),
        *(owner("/v1/responses", _NEXT | key) for key in _CONTINUATIONS),
        owner(
            "/v1/responses", {**_NEXT, "input": [{"type": "item_reference", "id": "<answered>"}, *_CHAT["messages"]]}
        ),
    ],
    ("POST", "/v1/responses/compact"): [
        Call("key", "/v1/responses/compact", {"input": "Hi"}),
        owner("/v1/responses/compact", {"input": "Hi", "previous_response_id": "<response>"}),
    ],
    ("POST", "/v1/responses/input_tokens"): [
        Call("key", "/v1/responses/input_tokens", {"input": "Hi"}),
        *(owner("/v1/responses/input_tokens", {"input": "Hi", **key}) for key in _CONTINUATIONS),
    ],
    ("GET", "/v1/responses/{id}"): [owner(_RESP), owner(f"{_RESP}?stream=true")],
    ("DELETE", "/v1/responses/{id}"): [owner(_RESP)],
    ("POST", "/v1/responses/{id}/cancel"): [owner(f"{_RESP}/cancel")],
    ("GET", "/v1/responses/{id}/input_items"): [owner(f"{_RESP}/input_items")],
    ("POST", "/v1/cache/explain"): [
        Call("key", "/v1/cache/explain", {"messages": [{"role": "user", "content": SECRET[:5]}]}),
        *(owner("/v1/cache/explain", {"input": "Hi", **key}) for key in _CONTINUATIONS[:3]),
    ],
    ("GET", "/v1/cache/accounts"): [Call("key", "/v1/cache/accounts")],
    ("GET", "/v1/admin"): [Call("admin", "/v1/admin")],
    ("GET", "/v1/cache/map"): [Call("key", "/v1/cache/map")],
    ("POST", "/v1/cache/warmth"): [Call("key", "/v1/cache/warmth", {"conversations": ["<conversation>"]})],
    ("GET", "/v1/conversations"): [
        Call("key", "/v1/conversations?limit=100"),
        Call("key", "/v1/conversations?query=zebra"),
        owner("/v1/conversations?after=<conversation>"),
    ],
    ("POST", "/v1/conversations"): [Call("key", "/v1/conversations", {"title": "Mine"})],
    ("GET", "/v1/conversations/export"): [Call("key", "/v1/conversations/export")],
    ("POST", "/v1/attachments"): [Call("key", "/v1/attachments?filename=a.txt", raw=b"text")],
    ("POST", "/v1/conversations/import"): [Call("key", "/v1/conversations/import?dry_run=true", raw=b"[]")],
    ("GET", "/v1/conversations/{id}"): [owner(_CONV)],
    ("POST", "/v1/conversations/{id}"): [owner(_CONV, {"title": "Mine now"})],
    ("DELETE", "/v1/conversations/{id}"): [owner(_CONV)],
    ("GET", "/v1/conversations/{id}/export"): [owner(f"{_CONV}/export"), owner(f"{_CONV}/export?format=markdown")],
    ("POST", "/v1/conversations/{id}/branch"): [
        owner(f"{_CONV}/branch"),
        owner(f"{_CONV}/branch", {"leaf": "<asked>"}),
    ],
    ("POST", "/v1/conversations/{id}/share"): [owner(f"{_CONV}/share", {"leaf": "<asked>"})],
    ("DELETE", "/v1/conversations/{id}/share"): [owner(f"{_CONV}/share")],
    ("GET", "/share/{token}"): [Call("open", "/share/<conversation>.wrong")],
    ("GET", "/v1/prompts"): [Call("tenant", "/v1/prompts")],
    ("POST", "/v1/prompts"): [Call("tenant", "/v1/prompts", {"name": "greet", "text": "Hi"})],
    ("GET", "/v1/prompts/{name}"): [Call("tenant", "/v1/prompts/greet")],
    ("POST", "/v1/prompts/{name}"): [Call("tenant", "/v1/prompts/greet", {"text": "Hello"})],
    ("DELETE", "/v1/prompts/{name}"): [Call("tenant", "/v1/prompts/greet")],
    ("GET", "/v1/mcp/servers"): [Call("key", "/v1/mcp/servers")],
    ("POST", "/v1/mcp/calls"): [Call("tenant", "/v1/mcp/calls", {"server": "none", "tool": "none"})],  # 404 for all
    ("POST", "/v1/conversations/{id}/title"): [owner(f"{_CONV}/title")],
    ("GET", "/v1/conversations/{id}/items"): [owner(f"{_CONV}/items"), owner(f"{_CONV}/items?branches=all")],
    ("POST", "/v1/conversations/{id}/items"): [owner(f"{_CONV}/items", {"items": [{"role": "user", "content": "x"}]})],
    ("GET", "/v1/conversations/{id}/items/{item_id}"): [owner(_ITEM)],
    ("DELETE", "/v1/conversations/{id}/items/{item_id}"): [owner(_ITEM)],
    ("GET", "/v1/conversations/{id}/items/{item_id}/tokens"): [owner(f"{_ITEM}/tokens")],
    ("GET", "/v1/conversations/{id}/items/{item_id}/tokens/{index}"): [owner(f"{_ITEM}/tokens/0")],
}


def served_routes(routes: Iterable[BaseRoute]) -> set[RouteKey]:
    """Return the methods and paths that an application serves, without WebSockets."""
    return {key for route in routes for key in route_keys(route) if key[0] != "WS"}


def route_keys(route: BaseRoute) -> set[RouteKey]:
    """Return the methods and path of a route; "WS" stands for a WebSocket."""
    if isinstance(route, ProtectedRoute):
        route = route.route
    if isinstance(route, WebSocketRoute):
        return {("WS", route.path)}
    if isinstance(route, Mount):
        return {("GET", route.path)}
    assert isinstance(route, Route)
    methods = route.endpoint.methods if isinstance(route.endpoint, MethodDispatcher) else route.methods or ()
    return {(method, route.path) for method in methods if method not in ("HEAD", "OPTIONS")}


def scene(keys: Keyed) -> Scene:
    body = {"input": f"{SECRET}, keep it", "max_output_tokens": 4, "ignore_eos": True}
    status, _, response = keys.server.request("POST", "/v1/responses", body, keys.ann.bearer)
    assert status == 200, response
    asked = keys.server.request("GET", f"/v1/responses/{response['id']}/input_items", headers=keys.ann.bearer)[2]
    return Scene(response["conversation"]["id"], response["id"], asked["data"][0]["id"], response["output"][0]["id"])


def credentials(keys: Keyed) -> dict[str, Headers]:
    """Return the headers of each client by its name. `ann` and her session are the owner."""
    until = int(time.time()) + 600
    gone = session_cookie_value(keys.gone.record.id, until, keys.gone.record.digest)
    return {
        **{name: getattr(keys, name).bearer for name in STRANGERS},
        "no key": {},
        "revoked": keys.gone.bearer,
        "revoked session": {"cookie": f"chatcache_session={gone}", "origin": keys.server.url},
        "unknown": {"authorization": f"Bearer {Held.__name__}"},
        "ann": keys.ann.bearer,
        "ann's session": keys.session_of(keys.ann),
    }


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


def violations(keys: Keyed, lines: Mapping[RouteKey, Sequence[Call]] = CALLS) -> list[str]:
    """List the responses that a client should not have got, and those that it was denied."""
    headers_of, found, current = credentials(keys), [], scene(keys)
    for (method, _), variants in lines.items():
        for line in variants:
            before = _state(keys, current)
            answers = {
                client: _ask(keys, method, line, current, headers)
                for client, headers in headers_of.items()
                if "ann" not in client
            }
            wrong = [
                f"{client}: {what}"
                for client, answer in answers.items()
                if (what := _wrong(keys, line, client, answer, current))
            ]
            if line.allowed == "owner":
                absent = _ask(keys, method, line, ABSENT, keys.bob.bearer)
                wrong += [
                    f"{client}: the response differs from that for a missing id: {answers[client]}, not {absent}"
                    for client in STRANGERS
                    if answers[client].status in (400, 404) and _bare(answers[client], current) != _bare(absent, ABSENT)
                ]
            if _state(keys, current) != before:
                wrong.append("another client has changed it")
            for client in ("ann", "ann's session"):
                answer = _ask(keys, method, line, current, headers_of[client])
                if what := _wrong(keys, line, client, answer, current):
                    wrong.append(f"{client}: {what}")
                current = scene(keys) if method != "GET" else current
            found += [f"{method} {line.path} {line.body or ''} {each}" for each in wrong]
    return found


def _ask(keys: Keyed, method: str, line: Call, current: Scene, headers: Headers) -> Answer:
    raw = current.fill(json.dumps(line.body)).encode() if line.body is not None else line.raw
    json_type = {"content-type": "application/json"} if raw is not None else {}
    status, got, answer = keys.server.request(method, current.fill(line.path), headers=headers | json_type, raw=raw)
    return Answer(status, f"{answer if isinstance(answer, str) else json.dumps(answer)} {got}")


def _wrong(keys: Keyed, line: Call, client: str, answer: Answer, current: Scene) -> str:
    """Describe what is wrong with an answer, or return ""."""
    sent = current.fill(line.path + json.dumps(line.body))
    if "ann" not in client:
        leaked = [each for each in (SECRET, *vars(current).values()) if each in answer.text and each not in sent]
        if leaked:
            return f"received {leaked}: {answer}"
    expected = _expected(line, client)
    if answer.status not in expected:
        return f"got {answer.status}, not one of {expected}: {answer.text[:200]}"
    return ""


def _expected(line: Call, client: str) -> Sequence[int]:
    if line.allowed == "open":
        return (200, 404)
    if client in REFUSED or (line.allowed == "bearer" and client == "ann's session"):
        return (401,)
    if line.allowed == "admin":
        return (200,) if client == "admin" else (403,)
    if line.allowed == "tenant":
        return (200, 404, 409)
    if line.allowed == "owner" and "ann" not in client:
        return (404, 400)  # 400 if the field names a missing id
    return (200,)


def _bare(answer: Answer, current: Scene) -> str:
    """Return the error without ids."""
    text = answer.text.partition("} {")[0]
    for value in vars(current).values():
        text = text.replace(value, "ID")
    return text


def _state(keys: Keyed, current: Scene) -> Any:
    def get(path: str) -> Any:
        return keys.server.request("GET", path, headers=keys.ann.bearer)[2]

    return get(f"/v1/conversations/{current.conversation}"), get(
        f"/v1/conversations/{current.conversation}/items?branches=all"
    )
