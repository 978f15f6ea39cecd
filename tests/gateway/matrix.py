"""Who may do what: every route and every message of the socket, against everybody there is.

Everything belongs to `ann`. `violations` asks for it as everybody else and says who got more than they may.
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

# open: all alike. key: all with a key, and nobody hears of ann's. bearer: the same, but not by session.
# owner: ann alone; to others it is not there. admin: administrators.
For = Literal["open", "key", "bearer", "owner", "admin"]
Place = tuple[str, str]

SECRET = "zebra canary 7131"
STRANGERS = ("bob", "other", "admin")
REFUSED = ("nobody", "gone", "gone's session", "unknown")


@dataclass(frozen=True)
class Scene:
    """A conversation of ann's."""

    conversation: str
    response: str
    asked: str
    answered: str

    def fill(self, text: str) -> str:
        """A path or body with ann's ids in the place of their names."""
        for name, value in vars(self).items():
            text = text.replace(f"<{name}>", value)
        return text


ABSENT = Scene(*(f"{kind}_{'0' * 28}" for kind in ("conv", "resp", "msg", "msg")))


@dataclass(frozen=True)
class Line:
    """One call, and whom it is for. Ids of the scene stand as `<response>` and so on."""

    may: For
    path: str
    body: object = None
    raw: bytes | None = None


def owner(path: str, body: object = None) -> Line:
    return Line("owner", path, body)


_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
_NEXT = {"input": "Hi", "max_output_tokens": 1}
_CONV, _ITEM = "/v1/conversations/<conversation>", "/v1/conversations/<conversation>/items/<answered>"
_RESP = "/v1/responses/<response>"
_PLACES: tuple[dict[str, object], ...] = (
    {"previous_response_id": "<response>"},
    {"conversation": "<conversation>"},
    {"previous_item_id": "<answered>"},
    {"previous_item_id": "<answered>", "fork_at": 1},
)

LINES: Mapping[Place, Sequence[Line]] = {
    ("GET", "/"): [Line("open", "/")],
    ("GET", "/assets"): [Line("open", "/assets/none.js")],
    ("GET", "/{file}"): [Line("open", "/none.svg")],
    ("GET", "/livez"): [Line("open", "/livez")],
    ("GET", "/readyz"): [Line("open", "/readyz")],
    ("GET", "/health"): [Line("open", "/health")],
    ("GET", "/version"): [Line("open", "/version")],
    ("GET", "/openapi.json"): [Line("open", "/openapi.json")],
    ("GET", "/metrics"): [Line("admin", "/metrics")],
    ("GET", "/v1/session"): [Line("key", "/v1/session")],
    ("POST", "/v1/session"): [Line("bearer", "/v1/session")],
    ("DELETE", "/v1/session"): [Line("open", "/v1/session")],
    ("POST", "/tokenize"): [Line("key", "/tokenize", {"prompt": "Hi"})],
    ("POST", "/detokenize"): [Line("key", "/detokenize", {"tokens": [1]})],
    ("GET", "/v1/models"): [Line("key", "/v1/models")],
    ("GET", "/v1/models/{id:path}"): [Line("key", f"/v1/models/{MODEL}")],
    ("POST", "/v1/chat/completions"): [Line("key", "/v1/chat/completions", _CHAT)],
    ("POST", "/v1/completions"): [Line("key", "/v1/completions", {"prompt": "Hi", "max_tokens": 1})],
    ("POST", "/v1/responses"): [
        Line("key", "/v1/responses", _NEXT),
        *(owner("/v1/responses", _NEXT | place) for place in _PLACES),
    ],
    ("POST", "/v1/responses/input_tokens"): [
        Line("key", "/v1/responses/input_tokens", {"input": "Hi"}),
        *(owner("/v1/responses/input_tokens", {"input": "Hi", **place}) for place in _PLACES),
    ],
    ("GET", "/v1/responses/{id}"): [owner(_RESP), owner(f"{_RESP}?stream=true")],
    ("DELETE", "/v1/responses/{id}"): [owner(_RESP)],
    ("POST", "/v1/responses/{id}/cancel"): [owner(f"{_RESP}/cancel")],
    ("GET", "/v1/responses/{id}/input_items"): [owner(f"{_RESP}/input_items")],
    ("POST", "/v1/cache/explain"): [
        Line("key", "/v1/cache/explain", {"messages": [{"role": "user", "content": SECRET[:5]}]}),
        *(owner("/v1/cache/explain", {"input": "Hi", **place}) for place in _PLACES[:3]),
    ],
    ("GET", "/v1/cache/accounts"): [Line("key", "/v1/cache/accounts")],
    ("GET", "/v1/cache/map"): [Line("key", "/v1/cache/map")],
    ("POST", "/v1/cache/warmth"): [Line("key", "/v1/cache/warmth", {"conversations": ["<conversation>"]})],
    ("GET", "/v1/conversations"): [
        Line("key", "/v1/conversations?limit=100"),
        Line("key", "/v1/conversations?query=zebra"),
        owner("/v1/conversations?after=<conversation>"),
    ],
    ("POST", "/v1/conversations"): [Line("key", "/v1/conversations", {"title": "Mine"})],
    ("GET", "/v1/conversations/export"): [Line("key", "/v1/conversations/export")],
    ("POST", "/v1/conversations/import"): [Line("key", "/v1/conversations/import?dry_run=true", raw=b"[]")],
    ("GET", "/v1/conversations/{id}"): [owner(_CONV)],
    ("POST", "/v1/conversations/{id}"): [owner(_CONV, {"title": "Mine now"})],
    ("DELETE", "/v1/conversations/{id}"): [owner(_CONV)],
    ("GET", "/v1/conversations/{id}/export"): [owner(f"{_CONV}/export"), owner(f"{_CONV}/export?format=markdown")],
    ("POST", "/v1/conversations/{id}/title"): [owner(f"{_CONV}/title")],
    ("GET", "/v1/conversations/{id}/items"): [owner(f"{_CONV}/items"), owner(f"{_CONV}/items?branches=all")],
    ("POST", "/v1/conversations/{id}/items"): [owner(f"{_CONV}/items", {"items": [{"role": "user", "content": "x"}]})],
    ("GET", "/v1/conversations/{id}/items/{item_id}"): [owner(_ITEM)],
    ("DELETE", "/v1/conversations/{id}/items/{item_id}"): [owner(_ITEM)],
    ("GET", "/v1/conversations/{id}/items/{item_id}/tokens"): [owner(f"{_ITEM}/tokens")],
    ("GET", "/v1/conversations/{id}/items/{item_id}/tokens/{index}"): [owner(f"{_ITEM}/tokens/0")],
}


def places(routes: Iterable[BaseRoute]) -> set[Place]:
    """The methods and paths that an app serves, without WebSockets."""
    return {place for route in routes for place in places_of(route) if place[0] != "WS"}


def places_of(route: BaseRoute) -> set[Place]:
    """The methods and path of a route; "WS" stands for a WebSocket."""
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
    body = {"input": f"{SECRET}, tell nobody", "max_output_tokens": 4, "ignore_eos": True}
    status, _, response = keys.server.request("POST", "/v1/responses", body, keys.ann.bearer)
    assert status == 200, response
    asked = keys.server.request("GET", f"/v1/responses/{response['id']}/input_items", headers=keys.ann.bearer)[2]
    return Scene(response["conversation"]["id"], response["id"], asked["data"][0]["id"], response["output"][0]["id"])


def everybody(keys: Keyed) -> dict[str, Headers]:
    """Everybody there is, by name, and what they send. `ann` and her session are the owner."""
    until = int(time.time()) + 600
    gone = session_cookie_value(keys.gone.record.id, until, keys.gone.record.digest)
    return {
        **{name: getattr(keys, name).bearer for name in STRANGERS},
        "nobody": {},
        "gone": keys.gone.bearer,
        "gone's session": {"cookie": f"chatcache_session={gone}", "origin": keys.server.url},
        "unknown": {"authorization": f"Bearer {Held.__name__}"},
        "ann": keys.ann.bearer,
        "ann's session": keys.session_of(keys.ann),
    }


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


def violations(keys: Keyed, lines: Mapping[Place, Sequence[Line]] = LINES) -> list[str]:
    """Everything that somebody got and may not, or did not get and may."""
    people, found = everybody(keys), []
    for (method, _), variants in lines.items():
        for line in variants:
            here = scene(keys)
            before = _state(keys, here)
            answers = {
                who: _ask(keys, method, line, here, headers) for who, headers in people.items() if "ann" not in who
            }
            wrong = [
                f"{who}: {what}" for who, answer in answers.items() if (what := _wrong(keys, line, who, answer, here))
            ]
            if line.may == "owner":
                absent = _ask(keys, method, line, ABSENT, keys.bob.bearer)
                wrong += [
                    f"{who}: is told more than of what is not there: {answers[who]}, not {absent}"
                    for who in STRANGERS
                    if answers[who].status in (400, 404) and _bare(answers[who], here) != _bare(absent, ABSENT)
                ]
            if _state(keys, here) != before:
                wrong.append("somebody has changed it")
            for who in ("ann", "ann's session"):
                answer = _ask(keys, method, line, here, people[who])
                if what := _wrong(keys, line, who, answer, here):
                    wrong.append(f"{who}: {what}")
                here = scene(keys) if method != "GET" else here
            found += [f"{method} {line.path} {line.body or ''} {each}" for each in wrong]
    return found


def _ask(keys: Keyed, method: str, line: Line, here: Scene, headers: Headers) -> Answer:
    raw = here.fill(json.dumps(line.body)).encode() if line.body is not None else line.raw
    json_type = {"content-type": "application/json"} if raw is not None else {}
    status, got, answer = keys.server.request(method, here.fill(line.path), headers=headers | json_type, raw=raw)
    return Answer(status, f"{answer if isinstance(answer, str) else json.dumps(answer)} {got}")


def _wrong(keys: Keyed, line: Line, who: str, answer: Answer, here: Scene) -> str:
    """What is wrong with an answer, or ""."""
    sent = here.fill(line.path + json.dumps(line.body))
    if "ann" not in who:
        leaked = [each for each in (SECRET, *vars(here).values()) if each in answer.text and each not in sent]
        if leaked:
            return f"is told {leaked}: {answer}"
    expected = _expected(line, who)
    if answer.status not in expected:
        return f"got {answer.status}, not one of {expected}: {answer.text[:200]}"
    return ""


def _expected(line: Line, who: str) -> Sequence[int]:
    if line.may == "open":
        return (200, 404)
    if who in REFUSED or (line.may == "bearer" and who == "ann's session"):
        return (401,)
    if line.may == "admin":
        return (200,) if who == "admin" else (403,)
    if line.may == "owner" and "ann" not in who:
        return (404, 400)  # 400 where the field names what is not there, as for one's own mistakes
    return (200,)


def _bare(answer: Answer, here: Scene) -> str:
    """The error without ids."""
    text = answer.text.partition("} {")[0]
    for value in vars(here).values():
        text = text.replace(value, "ID")
    return text


def _state(keys: Keyed, here: Scene) -> Any:
    def get(path: str) -> Any:
        return keys.server.request("GET", path, headers=keys.ann.bearer)[2]

    return get(f"/v1/conversations/{here.conversation}"), get(
        f"/v1/conversations/{here.conversation}/items?branches=all"
    )
