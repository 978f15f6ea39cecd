"""The API as data: one entry per method and path, one per WebSocket. `openapi.json` is made of this table.

Who adds a route in `app.py` adds its entry here; who adds a field to an answer adds it to `answers*.py`. A test
compares the table with the routes that are served, and real answers with the types named here.
"""

from __future__ import annotations

from collections.abc import Mapping

from chatcache.gateway import answers, answers_cache, answers_responses, answers_stored, wire
from chatcache.gateway.api_operation import Body, Operation, Socket
from chatcache.gateway.api_queries import (
    ExportQuery,
    ImportQuery,
    InputItemsQuery,
    ItemsQuery,
    RetrieveQuery,
    RevQuery,
    SearchQuery,
    TokenQuery,
)

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
