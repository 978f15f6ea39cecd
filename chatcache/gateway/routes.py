"""What each route wants of whoever calls it. A route that is not in the table is not served: default deny.

open    anybody, with or without a key
key     somebody: a valid key or session, or an open server
admin   a key that may look after the server

What the table says of one method of a path, and of one WebSocket.

What may stand behind the `?` of a path, for the table.

The API as data: one entry per method and path, one per WebSocket. `openapi.json` is made of this table.

Who adds a route in `app.py` adds its entry here; who adds a field to an answer adds it to `answers*.py`. A test
compares the table with the routes that are served, and real answers with the types named here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from chatcache.errors import NotFoundError
from chatcache.gateway.auth.principal import current_principal
from chatcache.gateway.errors import PermissionDeniedError
from chatcache.gateway.schemas import requests as wire
from chatcache.gateway.schemas import responses as answers
from chatcache.gateway.schemas import responses as answers_cache
from chatcache.gateway.schemas import responses as answers_responses
from chatcache.gateway.schemas import responses as answers_stored
from chatcache.types.request import MAX_TOP_LOGPROBS

Need = Literal["open", "key", "admin"]

ACCESS: Mapping[str, Need] = {
    "/": "open",
    "/assets": "open",
    "/{file}": "open",
    "/livez": "open",
    "/readyz": "open",
    "/health": "open",
    "/version": "open",
    "/openapi.json": "open",
    "/metrics": "admin",
    "/tokenize": "key",
    "/detokenize": "key",
    "/v1/session": "open",  # the ways in and out; the handlers ask for the key
    "/v1/models": "key",
    "/v1/models/{id:path}": "key",
    "/v1/chat/completions": "key",
    "/v1/completions": "key",
    "/v1/responses": "key",
    "/v1/responses/input_tokens": "key",
    "/v1/responses/{id}": "key",
    "/v1/responses/{id}/cancel": "key",
    "/v1/responses/{id}/input_items": "key",
    "/v1/cache/explain": "key",
    "/v1/cache/accounts": "key",
    "/v1/cache/map": "key",
    "/v1/cache/warmth": "key",
    "/v1/conversations": "key",
    "/v1/conversations/export": "key",
    "/v1/conversations/import": "key",
    "/v1/conversations/{id}": "key",
    "/v1/conversations/{id}/export": "key",
    "/v1/conversations/{id}/title": "key",
    "/v1/conversations/{id}/items": "key",
    "/v1/conversations/{id}/items/{item_id}": "key",
    "/v1/conversations/{id}/items/{item_id}/tokens": "key",
    "/v1/conversations/{id}/items/{item_id}/tokens/{index}": "key",
}


class Protected(BaseRoute):
    """A route behind what it needs, which is looked at before anything else of it: methods too."""

    def __init__(self, route: BaseRoute, need: Need) -> None:
        self.route = route
        self.need = need
        self.path: str = getattr(route, "path", "")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: AuthenticationError, PermissionDeniedError, StoreUnavailableError."""
        if self.need != "open":
            principal = current_principal(scope)
            if self.need == "admin" and not principal.is_admin:
                raise PermissionDeniedError(f"{self.path} is for keys made with --admin", code="admin_only")
        await self.route.handle(scope, receive, send)


class Unmatched:
    """What no route is. What is here and what is not, strangers are not told."""

    def __init__(self, not_found: ASGIApp) -> None:
        self._not_found = not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: AuthenticationError, PermissionDeniedError, StoreUnavailableError; NotFoundError for a WebSocket,
        which else just ends."""
        current_principal(scope)
        if scope["type"] == "websocket":
            raise NotFoundError("no WebSocket is served here")
        await self._not_found(scope, receive, send)


def protected(routes: Iterable[BaseRoute]) -> list[BaseRoute]:
    """Every route behind what the table says. Raises: LookupError for one of which it says nothing."""
    return [Protected(route, _need_of(route)) for route in routes]


def _need_of(route: BaseRoute) -> Need:
    path = getattr(route, "path", None)
    if not isinstance(path, str) or path not in ACCESS:
        raise LookupError(f"who may use {path or route!r} is not said in gateway/routes.py")
    return ACCESS[path]


class Body(NamedTuple):
    """A request body: the fields of several structs as one object, under one name."""

    name: str
    kinds: tuple[type[msgspec.Struct], ...]
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path, as it is routed.

    `answer`: the type of a 200, None for text that is not JSON. `stream`: the type of each event where SSE is offered.
    `also`: media types of text that it can be instead. `takes`: those of a body that is a file. `errors`: statuses
    beside those every route may answer with; `failures`: bodies that are more than the envelope. `once`: takes an
    `Idempotency-Key`. Whether it needs a key is in `access.py`.
    """

    method: str
    path: str
    summary: str
    answer: object
    body: Body | None = None
    query: type[msgspec.Struct] | None = None
    stream: object = None
    media_type: str = "application/json"
    also: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    failures: Mapping[int, object] = field(default_factory=dict)
    once: bool = False

    @property
    def needs_key(self) -> bool:
        return ACCESS[self.path] != "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A WebSocket: the messages it takes, by their `type`."""

    path: str
    summary: str
    messages: Mapping[str, Body]


class ListQuery(msgspec.Struct):
    """How lists are paged."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


class InputItemsQuery(msgspec.Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class RetrieveQuery(msgspec.Struct):
    """`stream`: its events, those behind `starting_after`."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None


class ItemsQuery(msgspec.Struct):
    """Which items: a page of the path to `leaf` (the active leaf), or all branches in one piece, oldest first."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    leaf: str | None = None
    branches: Literal["all"] | None = None


class SearchQuery(ListQuery):
    """`query`: words that must all be in the title or in one message; the last may be the beginning of one."""

    query: Annotated[str, Meta(max_length=4096)] | None = None


class ExportQuery(msgspec.Struct):
    """`branch`: the message at which it ends, or "all". JSON is of all branches by default, Markdown of the active."""

    format: Literal["json", "markdown"] = "json"
    branch: str | None = None


class ImportQuery(msgspec.Struct):
    """`dry_run`: tell what would happen, and change nothing."""

    dry_run: bool = False


class TokenQuery(msgspec.Struct):
    """`top`: how many of the likeliest to tell."""

    top: Annotated[int, Meta(ge=1, le=MAX_TOP_LOGPROBS)] = 8


class RevQuery(msgspec.Struct):
    """The revision that the client has seen: anything else is a 409."""

    rev: Annotated[int, Meta(ge=0, le=10**15 - 1)] | None = None


# The page and its files: not an API.
PAGE_PATHS = frozenset({"/", "/assets", "/{file}"})

_SAMPLING = wire.SamplingFields
_MODEL = (404, 503)  # no such model; not loaded yet, or no room in the queue
_WORK = (404, 429, 503)  # more than the key, its tenant or its owner may have now
_STARTING = (503,)
_CONVERSATION = (404, 503)
_CONFLICT: Mapping[int, object] = {409: answers_stored.Conflict}
_RESPONSE_FIELDS = (wire.ResponseFields, wire.SamplingFields)
_NOT_READY: Mapping[int, object] = {503: answers.NotReady}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a chat; keeps nothing but cached pages",
        body=Body("ChatCompletionRequest", (wire.ChatFields, wire.CompletionBase, _SAMPLING)),
        answer=answers.ChatCompletion,
        stream=answers.ChatCompletionChunk,
        errors=_WORK,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue texts or token ids",
        body=Body("CompletionRequest", (wire.CompletionFields, wire.CompletionBase, _SAMPLING)),
        answer=answers.Completion,
        stream=answers.Completion,
        errors=_WORK,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        summary="Answer in a stored conversation: continue it, begin one, or branch off anywhere",
        body=Body("ResponseRequest", (*_RESPONSE_FIELDS, wire.DeliveryFields)),
        answer=answers_responses.Response,
        stream=answers_responses.ResponseEvent,
        errors=_WORK,
        failures=_CONFLICT,
        once=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        summary="How long the prompt of such a request would be; computes and stores nothing",
        body=Body("InputTokensRequest", _RESPONSE_FIELDS),
        answer=answers_responses.InputTokens,
        errors=_WORK,
        failures=_CONFLICT,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}",
        summary="A response as it is now, or its events from any point on while they are kept",
        query=RetrieveQuery,
        answer=answers_responses.Response,
        stream=answers_responses.ResponseEvent,
        errors=(400, *_CONVERSATION),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        summary="Delete a response; what others were continued from stays in the conversation as messages",
        answer=answers_responses.DeletedResponse,
        errors=(409, *_CONVERSATION),
    ),
    Operation(
        method="POST",
        path="/v1/responses/{id}/cancel",
        summary="End it within one engine step, with a receipt; one that has ended stays as it is",
        answer=answers_responses.Response,
        errors=_CONVERSATION,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}/input_items",
        summary="The messages that came with the request",
        query=InputItemsQuery,
        answer=answers.Page[answers_stored.ListedItem],
        errors=(400, *_CONVERSATION),
    ),
    Operation(
        method="GET",
        path="/v1/conversations",
        summary="List conversations, the last continued first, or those where words are found in a title or any branch",
        query=SearchQuery,
        answer=answers_stored.ConversationPage,
        errors=(400, *_CONVERSATION),
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}",
        summary="One conversation",
        answer=answers_stored.Conversation,
        errors=_CONVERSATION,
    ),
    Operation(
        method="POST",
        path="/v1/conversations/{id}",
        summary="Rename it, set metadata, point it at another leaf; 409 if `rev` is not the current one",
        body=Body("ConversationPatch", (wire.ConversationPatch,)),
        answer=answers_stored.Conversation,
        errors=_CONVERSATION,
        failures=_CONFLICT,
    ),
    Operation(
        method="DELETE",
        path="/v1/conversations/{id}",
        summary="Delete it with all its messages; a response under way in it ends",
        query=RevQuery,
        answer=answers_stored.Deleted,
        errors=(400, *_CONVERSATION),
        failures=_CONFLICT,
    ),
    Operation(
        method="POST",
        path="/v1/conversations",
        summary="Make a conversation, empty or with the messages it begins with",
        body=Body("ConversationCreate", (wire.ConversationFields,), required=False),
        answer=answers_stored.Conversation,
        errors=(404, *_STARTING),
        failures=_CONFLICT,
        once=True,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/export",
        summary="The conversation as a file: lossless JSON with token ids, or Markdown to read",
        query=ExportQuery,
        answer=dict[str, object],
        also=("text/markdown",),
        errors=(400, *_CONVERSATION),
    ),
    Operation(
        method="GET",
        path="/v1/conversations/export",
        summary="All conversations, one JSON file to a line; a last line tells how many",
        answer=None,
        media_type="application/x-ndjson",
        errors=_STARTING,
    ),
    Operation(
        method="POST",
        path="/v1/conversations/import",
        summary="Import exported conversations, or ChatGPT's conversations.json; doing it again changes nothing",
        query=ImportQuery,
        takes=("application/json", "application/x-ndjson"),
        answer=answers_stored.Import,
        errors=(400, 408, 413, 415, *_STARTING),
    ),
    Operation(
        method="POST",
        path="/v1/conversations/{id}/title",
        summary="Let the model name it, as a fork of the conversation: its history comes from the cache",
        body=Body("TitleRequest", (wire.TitleFields,), required=False),
        answer=answers_stored.Title,
        errors=_WORK,
        failures=_CONFLICT,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/items",
        summary="Messages along one path of the tree, or all of them",
        query=ItemsQuery,
        answer=answers.Page[answers_stored.ListedItem],
        errors=(400, *_CONVERSATION),
    ),
    Operation(
        method="POST",
        path="/v1/conversations/{id}/items",
        summary="Append messages without asking for an answer; 409 if `rev` is not the current one",
        body=Body("ItemsCreate", (wire.ItemsFields,)),
        answer=answers.Page[answers_stored.ListedItem],
        errors=_CONVERSATION,
        failures=_CONFLICT,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/items/{item_id}",
        summary="One message, on whatever branch",
        answer=answers_stored.ListedItem,
        errors=_CONVERSATION,
    ),
    Operation(
        method="DELETE",
        path="/v1/conversations/{id}/items/{item_id}",
        summary="Take a message out of every branch it is on; 409 while a response that continues it is generated",
        query=RevQuery,
        answer=answers_stored.Conversation,
        errors=(400, *_CONVERSATION),
        failures=_CONFLICT,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/items/{item_id}/tokens",
        summary="Which characters of a generated message each of its tokens shows",
        answer=answers_stored.MessageTokens,
        errors=(400, *_CONVERSATION),
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/items/{item_id}/tokens/{index}",
        summary="What else the model would have said at a token, with probabilities; one step, stores nothing",
        query=TokenQuery,
        answer=answers_stored.MessageToken,
        errors=(400, *_WORK),
    ),
    Operation(method="GET", path="/v1/models", summary="The served model", answer=answers.Models),
    Operation(
        method="GET",
        path="/v1/models/{id:path}",
        summary="One model; its id may contain slashes",
        answer=answers.Model,
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        summary="The token ids of a text, or of a chat as its template writes it",
        body=Body("TokenizeRequest", (wire.TokenizeFields,)),
        answer=answers.Tokens,
        errors=_WORK,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="The text of token ids",
        body=Body("DetokenizeRequest", (wire.DetokenizeFields,)),
        answer=answers.Text,
        errors=_WORK,
    ),
    Operation(
        method="POST",
        path="/v1/cache/explain",
        summary="Which pages a prompt would find in the cache, and why not more; computes and stores nothing",
        body=Body("ExplainRequest", (wire.ExplainFields,)),
        answer=answers_cache.CacheExplanation,
        errors=_WORK,
    ),
    Operation(
        method="GET",
        path="/v1/cache/accounts",
        summary="Who holds how many pages now, shared ones in fractions",
        answer=answers_cache.CacheAccounts,
        errors=_STARTING,
    ),
    Operation(
        method="GET",
        path="/v1/cache/map",
        summary="Every page in one letter: free, idle, in the table of one branch or of several, another tenant's",
        answer=answers_cache.CacheMap,
        errors=_STARTING,
    ),
    Operation(
        method="POST",
        path="/v1/cache/warmth",
        summary="How much of these conversations, along their active paths, is in the cache; computes nothing",
        body=Body("WarmthRequest", (wire.WarmthFields,)),
        answer=answers_cache.CacheWarmth,
        errors=_STARTING,
    ),
    Operation(method="GET", path="/livez", summary="The process answers", answer=answers.Alive),
    Operation(
        method="GET",
        path="/readyz",
        summary="Whether the next request would be answered, and how far loading is",
        answer=answers.Ready,
        failures=_NOT_READY,
    ),
    Operation(
        method="GET",
        path="/health",
        summary="The same as /readyz",
        answer=answers.Ready,
        failures=_NOT_READY,
    ),
    Operation(
        method="GET",
        path="/metrics",
        summary="Prometheus metrics; on a server with keys, for those of administrators",
        answer=None,
        media_type="text/plain",
    ),
    Operation(method="GET", path="/v1/session", summary="Who one is", answer=answers.Session, errors=(401, 503)),
    Operation(
        method="POST",
        path="/v1/session",
        summary="Take a key for a cookie that opens the same, until it expires or the key is revoked",
        answer=answers.Session,
        errors=(401, 503),
    ),
    Operation(method="DELETE", path="/v1/session", summary="Forget the cookie", answer=answers.SessionDeleted),
    Operation(method="GET", path="/version", summary="The server's version", answer=answers.Version),
    Operation(method="GET", path="/openapi.json", summary="This document", answer=dict[str, object]),
)

SOCKETS: tuple[Socket, ...] = (
    Socket(
        path="/v1/responses",
        summary="OpenAI's WebSocket mode: responses of stored conversations, several lanes on one socket",
        messages={
            "response.create": Body("ResponseCreate", (wire.ResponseFields, _SAMPLING, wire.CreateFields)),
            "response.cancel": Body("ResponseCancel", (wire.CancelFields,)),
            "response.steer": Body("ResponseSteer", (wire.SteerFields,)),
            "response.resume": Body("ResponseResume", (wire.ResumeFields,)),
            "response.drop": Body("ResponseDrop", (wire.DropFields,)),
            "response.ack": Body("ResponseAck", (wire.AckFields,)),
            "conversation.subscribe": Body("ConversationSubscribe", ()),
            "prompt.prewarm": Body("PromptPrewarm", (wire.ResponseFields,)),
        },
    ),
)
