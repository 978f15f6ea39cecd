"""The route table: path, method, handler, permission, types and summary of each route.

The application's routes, the permission checks and the OpenAPI document are all built from `ROUTES`. To add a route,
add an entry here, the types of its request and response to `schemas`, and a curl line to a page of `gateway/docs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from chatcache.gateway import health, static
from chatcache.gateway.api import cache, conversations, files, models, ollama, sessions, tokens
from chatcache.gateway.api.anthropic_messages import count_tokens, create_message
from chatcache.gateway.api.chat_completions import chat_completions
from chatcache.gateway.api.completions import completions
from chatcache.gateway.api.embeddings import embeddings, rerank, score
from chatcache.gateway.context import gateway_of
from chatcache.gateway.json_codec import encode
from chatcache.gateway.openapi import document
from chatcache.gateway.responses import http
from chatcache.gateway.routing import Body, Entry, Operation, PageFiles, Socket
from chatcache.gateway.schemas import anthropic, requests, responses
from chatcache.gateway.schemas import ollama as ollama_schemas
from chatcache.gateway.schemas.completions import ChatCompletion, ChatCompletionChunk, Completion
from chatcache.gateway.schemas.embeddings import (
    EmbeddingFields,
    Embeddings,
    Ranking,
    RerankFields,
    ScoreFields,
    Scores,
)
from chatcache.gateway.schemas.server import (
    Alive,
    CacheAccounts,
    CacheExplanation,
    CacheMap,
    CacheWarmth,
    Model,
    Models,
    NotReady,
    Ready,
    Session,
    SessionDeleted,
    Text,
    Tokens,
    Version,
)
from chatcache.gateway.websocket.connection import responses_socket

IMPORT_PATH = "/v1/conversations/import"


async def openapi(request: Request) -> Response:
    """GET /openapi.json: the route table as an OpenAPI document, encoded once."""
    gateway = gateway_of(request)
    if gateway.openapi is None:
        gateway.openapi = encode(document(ROUTES, gateway.version, gateway.config.root_path))
    return Response(gateway.openapi, media_type="application/json")


_NOT_LOADED = (503,)
_STORED = (404, *_NOT_LOADED)  # no such conversation, message or response
# No such model; over a limit of the key, its tenant or its owner; not loaded or the queue is full.
_LIMITED = (404, 429, 503)
_CONFLICT: Mapping[int, object] = {409: responses.Conflict}
_NOT_READY: Mapping[int, object] = {503: NotReady}
_RESPONSE_FIELDS = (requests.ResponseFields, requests.SamplingFields, requests.ThinkingFields)

# One entry per method and path; the document lists the paths in this order.
# fmt: off
ROUTES: tuple[Entry, ...] = (
    Operation("POST", "/v1/chat/completions", chat_completions, "key",
        "Generate a chat completion; the server stores nothing but KV cache pages",
        body=Body("ChatCompletionRequest",
                  (requests.ChatFields, requests.CompletionBase, requests.SamplingFields, requests.ThinkingFields)),
        response=ChatCompletion, stream=ChatCompletionChunk, errors=_LIMITED),
    Operation("POST", "/v1/completions", completions, "key",
        "Continue one or several texts or token sequences",
        body=Body("CompletionRequest", (requests.CompletionFields, requests.CompletionBase, requests.SamplingFields)),
        response=Completion, stream=Completion, errors=_LIMITED),
    Operation("POST", "/v1/embeddings", embeddings, "key",
        "Embed one or several texts or token sequences",
        body=Body("EmbeddingRequest", (EmbeddingFields,)), response=Embeddings, errors=_LIMITED),
    Operation("POST", "/v1/score", score, "key",
        "The cosine similarity of the embeddings of pairs of texts",
        body=Body("ScoreRequest", (ScoreFields,)), response=Scores, errors=_LIMITED),
    Operation("POST", "/v1/rerank", rerank, "key",
        "Documents in the order of their cosine similarity to a query",
        body=Body("RerankRequest", (RerankFields,)), response=Ranking, errors=_LIMITED),
    Operation("POST", "/v1/messages", create_message, "key",
        "Generate a message in Anthropic's format; the server stores nothing but KV cache pages",
        body=Body("MessageRequest", (anthropic.MessagesPrompt, anthropic.MessagesOptions)),
        response=anthropic.AssistantMessage, stream=anthropic.MessagesEvent, error=anthropic.MessagesError,
        errors=_LIMITED),
    Operation("POST", "/v1/messages/count_tokens", count_tokens, "key",
        "Count the prompt tokens of a message request; computes and stores nothing",
        body=Body("CountTokensRequest", (anthropic.MessagesPrompt,)), response=anthropic.TokenCount,
        error=anthropic.MessagesError, errors=_LIMITED),
    Operation("POST", "/api/chat", ollama.chat, "key",
        "Generate a message in Ollama's format, as a stream of JSON lines or whole",
        body=Body("OllamaChatRequest", (ollama_schemas.OllamaChat, ollama_schemas.OllamaBase)),
        response=ollama_schemas.OllamaChatReply, stream=ollama_schemas.OllamaChatReply, stream_media_type=ollama.NDJSON,
        error=ollama_schemas.OllamaError, errors=_LIMITED),
    Operation("POST", "/api/generate", ollama.generate, "key",
        "Generate a reply to one prompt in Ollama's format, or continue a raw prompt",
        body=Body("OllamaGenerateRequest", (ollama_schemas.OllamaGenerate, ollama_schemas.OllamaBase)),
        response=ollama_schemas.OllamaGenerateReply, stream=ollama_schemas.OllamaGenerateReply,
        stream_media_type=ollama.NDJSON, error=ollama_schemas.OllamaError, errors=_LIMITED),
    Operation("POST", "/api/embed", ollama.embed, "key",
        "Embed texts, in Ollama's format",
        body=Body("OllamaEmbedRequest", (ollama_schemas.OllamaEmbed,)), response=ollama_schemas.OllamaEmbedReply,
        error=ollama_schemas.OllamaError, errors=_LIMITED),
    Operation("POST", "/api/embeddings", ollama.embeddings, "key",
        "Embed one text, in the format of older clients of Ollama",
        body=Body("OllamaEmbeddingsRequest", (ollama_schemas.OllamaEmbeddings,)),
        response=ollama_schemas.OllamaEmbeddingsReply, error=ollama_schemas.OllamaError, errors=_LIMITED),
    Operation("GET", "/api/tags", ollama.tags, "key",
        "The served model, as Ollama lists it",
        response=ollama_schemas.OllamaTags, error=ollama_schemas.OllamaError),
    Operation("GET", "/api/ps", ollama.processes, "key",
        "The served model once it is loaded, as Ollama lists it",
        response=ollama_schemas.OllamaProcesses, error=ollama_schemas.OllamaError),
    Operation("POST", "/api/show", ollama.show, "key",
        "The chat template, context length and capabilities of the served model, as Ollama shows them",
        body=Body("OllamaShowRequest", (ollama_schemas.OllamaShow,)), response=ollama_schemas.OllamaModel,
        error=ollama_schemas.OllamaError, errors=(404, *_NOT_LOADED)),
    Operation("GET", "/api/version", ollama.version, "open",
        "The version of Ollama whose API is served",
        response=ollama_schemas.OllamaVersion, error=ollama_schemas.OllamaError),
    Operation("POST", "/v1/responses", http.create_response, "key",
        "Generate a response in a stored conversation: continue it, start one, or branch off at any message",
        body=Body("ResponseRequest", (*_RESPONSE_FIELDS, requests.DeliveryFields)), response=responses.Response,
        stream=responses.ResponseEvent, errors=_LIMITED, error_bodies=_CONFLICT, idempotent=True),
    Operation("POST", "/v1/responses/input_tokens", http.count_input_tokens, "key",
        "Count the prompt tokens of a response request; computes and stores nothing",
        body=Body("InputTokensRequest", _RESPONSE_FIELDS), response=responses.InputTokens, errors=_LIMITED,
        error_bodies=_CONFLICT),
    Operation("POST", "/v1/responses/compact", http.compact_response, "key",
        "Replace a conversation by its user's messages and a summary by the model; stores nothing",
        body=Body("CompactRequest", (requests.CompactFields, requests.ThinkingFields)),
        response=responses.CompactedResponse, errors=_LIMITED),
    Operation("GET", "/v1/responses/{id}", http.get_response, "key",
        "A response in its present state, or its events from any number on while the server keeps them",
        query=requests.RetrieveQuery, response=responses.Response, stream=responses.ResponseEvent,
        errors=(400, *_STORED)),
    Operation("DELETE", "/v1/responses/{id}", http.delete_response, "key",
        "Delete a response; messages that other responses continue stay in the conversation",
        response=responses.DeletedResponse, errors=(409, *_STORED)),
    Operation("POST", "/v1/responses/{id}/cancel", http.cancel_response, "key",
        "Cancel a response within one engine step; no effect on a response that has ended",
        response=responses.Response, errors=_STORED),
    Operation("GET", "/v1/responses/{id}/input_items", http.list_input_items, "key",
        "The input messages of a response",
        query=requests.InputItemsQuery, response=responses.Page[responses.ListedItem], errors=(400, *_STORED)),
    Operation("GET", "/v1/conversations", conversations.list_conversations, "key",
        "List conversations, most recently continued first, or search their titles and all their branches",
        query=requests.SearchQuery, response=responses.ConversationPage, errors=(400, *_STORED)),
    Operation("GET", "/v1/conversations/{id}", conversations.get_conversation, "key",
        "The head of one conversation: title, active leaf, revision and metadata",
        response=responses.Conversation, errors=_STORED),
    Operation("POST", "/v1/conversations/{id}", conversations.update_conversation, "key",
        "Set the title, the metadata or the active leaf; 409 if `rev` is not the current revision",
        body=Body("ConversationPatch", (requests.ConversationPatch,)), response=responses.Conversation, errors=_STORED,
        error_bodies=_CONFLICT),
    Operation("DELETE", "/v1/conversations/{id}", conversations.delete_conversation, "key",
        "Delete a conversation with all its messages; cancels its running responses",
        query=requests.RevQuery, response=responses.Deleted, errors=(400, *_STORED), error_bodies=_CONFLICT),
    Operation("POST", "/v1/conversations", conversations.create_conversation, "key",
        "Create a conversation, empty or with messages",
        body=Body("ConversationCreate", (requests.ConversationFields,), required=False),
        response=responses.Conversation, errors=(404, *_NOT_LOADED), error_bodies=_CONFLICT, idempotent=True),
    Operation("GET", "/v1/conversations/{id}/export", files.export_conversation, "key",
        "Export a conversation: lossless JSON with token ids, or readable Markdown",
        query=requests.ExportQuery, response=dict[str, object], text_types=("text/markdown",), errors=(400, *_STORED)),
    Operation("GET", "/v1/conversations/export", files.export_all, "key",
        "Export all conversations, one JSON document per line; the last line has their number",
        media_type="application/x-ndjson", errors=_NOT_LOADED),
    Operation("POST", IMPORT_PATH, files.import_conversations, "key",
        "Import exported conversations or ChatGPT's conversations.json; importing a file again changes nothing",
        query=requests.ImportQuery, upload_types=("application/json", "application/x-ndjson"),
        response=responses.Import, errors=(400, 408, 413, 415, *_NOT_LOADED)),
    Operation("POST", "/v1/conversations/{id}/title", conversations.generate_title, "key",
        "Generate a title with the model, as a fork of the conversation whose history is in the cache",
        body=Body("TitleRequest", (requests.TitleFields,), required=False), response=responses.Title, errors=_LIMITED,
        error_bodies=_CONFLICT),
    Operation("GET", "/v1/conversations/{id}/items", conversations.list_items, "key",
        "The messages of one path of the conversation tree, or of all branches",
        query=requests.ItemsQuery, response=responses.Page[responses.ListedItem], errors=(400, *_STORED)),
    Operation("POST", "/v1/conversations/{id}/items", conversations.create_items, "key",
        "Append messages without generating a response; 409 if `rev` is not the current revision",
        body=Body("ItemsCreate", (requests.ItemsFields,)), response=responses.Page[responses.ListedItem],
        errors=_STORED, error_bodies=_CONFLICT),
    Operation("GET", "/v1/conversations/{id}/items/{item_id}", conversations.get_item, "key",
        "One message, of any branch",
        response=responses.ListedItem, errors=_STORED),
    Operation("DELETE", "/v1/conversations/{id}/items/{item_id}", conversations.delete_item, "key",
        "Remove a message from every branch; 409 while a response that continues it is running",
        query=requests.RevQuery, response=responses.Conversation, errors=(400, *_STORED), error_bodies=_CONFLICT),
    Operation("GET", "/v1/conversations/{id}/items/{item_id}/tokens", tokens.list_tokens, "key",
        "The characters of the text that each token of a generated message stands for",
        response=responses.MessageTokens, errors=(400, *_STORED)),
    Operation("GET", "/v1/conversations/{id}/items/{item_id}/tokens/{index}", tokens.get_token, "key",
        "The most likely alternatives to one token, with probabilities; one engine step, stores nothing",
        query=requests.TokenQuery, response=responses.MessageToken, errors=(400, *_LIMITED)),
    Operation("GET", "/v1/models", models.list_models, "key",
        "The served model",
        response=Models),
    Operation("GET", "/v1/models/{id:path}", models.get_model, "key",
        "One model; its id may contain slashes",
        response=Model, errors=(404,)),
    Operation("POST", "/tokenize", models.tokenize, "key",
        "The token ids of a text, or of a chat rendered by the chat template",
        body=Body("TokenizeRequest", (requests.TokenizeFields, requests.ThinkingFields)),
        response=Tokens, errors=_LIMITED),
    Operation("POST", "/detokenize", models.detokenize, "key",
        "The text of token ids",
        body=Body("DetokenizeRequest", (requests.DetokenizeFields,)), response=Text, errors=_LIMITED),
    Operation("POST", "/v1/cache/explain", cache.explain, "key",
        "The cached pages of a prompt, and the reason for the first miss; computes and stores nothing",
        body=Body("ExplainRequest", (requests.ExplainFields, requests.ThinkingFields)),
        response=CacheExplanation, errors=_LIMITED),
    Operation("GET", "/v1/cache/accounts", cache.page_accounts, "key",
        "The pages held by each request and conversation; a shared page counts in fractions",
        response=CacheAccounts, errors=_NOT_LOADED),
    Operation("GET", "/v1/cache/map", cache.page_map, "key",
        "The state of every page as one letter: free, idle, used by one branch or several, another tenant's",
        response=CacheMap, errors=_NOT_LOADED),
    Operation("POST", "/v1/cache/warmth", cache.warmth, "key",
        "The cached part of the active path of each conversation; computes nothing",
        body=Body("WarmthRequest", (requests.WarmthFields,)), response=CacheWarmth, errors=_NOT_LOADED),
    Operation("GET", "/livez", health.livez, "open",
        "Liveness: the process responds",
        response=Alive),
    Operation("GET", "/readyz", health.readyz, "open",
        "Readiness: whether the server can serve requests, and the progress of loading",
        response=Ready, error_bodies=_NOT_READY),
    Operation("GET", "/health", health.readyz, "open",
        "The same as /readyz",
        response=Ready, error_bodies=_NOT_READY),
    Operation("GET", "/metrics", health.metrics, "admin",
        "Prometheus metrics; on a server with API keys, for admin keys only",
        media_type="text/plain"),
    Operation("GET", "/v1/session", sessions.get_session, "open",
        "The tenant and user of the request's key or cookie",
        response=Session, errors=(401, 503)),
    Operation("POST", "/v1/session", sessions.create_session, "open",
        "Exchange an API key for a session cookie, valid until it expires or the key is revoked",
        response=Session, errors=(401, 503)),
    Operation("DELETE", "/v1/session", sessions.delete_session, "open",
        "Delete the session cookie",
        response=SessionDeleted),
    Operation("GET", "/version", models.get_version, "open",
        "The server's version",
        response=Version),
    Operation("GET", "/openapi.json", openapi, "open",
        "This document",
        response=dict[str, object]),
    Socket("/v1/responses", responses_socket, "key",
        "OpenAI's WebSocket mode: responses of stored conversations, several streams on one socket",
        {
            "response.create": Body("ResponseCreate", (*_RESPONSE_FIELDS, requests.CreateFields)),
            "response.cancel": Body("ResponseCancel", (requests.CancelFields,)),
            "response.steer": Body("ResponseSteer", (requests.SteerFields,)),
            "response.resume": Body("ResponseResume", (requests.ResumeFields,)),
            "response.drop": Body("ResponseDrop", (requests.DropFields,)),
            "response.ack": Body("ResponseAck", (requests.AckFields,)),
            "conversation.subscribe": Body("ConversationSubscribe", ()),
            "prompt.prewarm": Body("PromptPrewarm", (requests.ResponseFields, requests.ThinkingFields)),
        }),
    PageFiles(Route("/", static.index)),
    PageFiles(Mount("/assets", static.Assets("assets"))),
    PageFiles(static.RootFiles()),
)
# fmt: on
OPERATIONS = tuple(entry for entry in ROUTES if isinstance(entry, Operation))
SOCKETS = tuple(entry for entry in ROUTES if isinstance(entry, Socket))
