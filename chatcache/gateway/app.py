"""The application: routes, middleware, lifespan."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from chatcache.config import ServerConfig
from chatcache.conversations.store import ConversationStore
from chatcache.engine.protocols import EngineClient
from chatcache.errors import ChatcacheError
from chatcache.gateway import health, static
from chatcache.gateway.api import cache, conversations, models, sessions
from chatcache.gateway.api import cache as cache_pages
from chatcache.gateway.api import conversations as conversation_items
from chatcache.gateway.api import conversations as conversation_titles
from chatcache.gateway.api import files as conversation_files
from chatcache.gateway.api import tokens as message_tokens
from chatcache.gateway.api.chat_completions import chat_completions
from chatcache.gateway.api.completions import completions
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.auth.middleware import AuthenticationMiddleware, RevocationMiddleware
from chatcache.gateway.context import Gateway
from chatcache.gateway.errors import on_chatcache_error, on_http_exception
from chatcache.gateway.limits.admission import AdmissionController
from chatcache.gateway.limits.rate_limits import RATE_HEADERS, Limiter
from chatcache.gateway.metrics import Metrics, metered_store
from chatcache.gateway.middleware import BodyLimit, RequestContext
from chatcache.gateway.openapi import openapi
from chatcache.gateway.responses import http as responses_http
from chatcache.gateway.responses import http as responses_stored
from chatcache.gateway.routes import Unmatched, protected
from chatcache.gateway.websocket.connection import responses_socket
from chatcache.storage.open import open_store
from chatcache.tokenizer.tokenizer import Tokenizer

IMPORT_PATH = "/v1/conversations/import"


def create_app(
    config: ServerConfig,
    engine: EngineClient,
    load_tokenizer: Callable[[], Tokenizer],
    model_name: str,
    *,
    store: ConversationStore | None = None,
) -> Starlette:
    """Build the gateway over an engine that somebody else starts and stops.

    `model_name` is the served name ("": the engine's own, known once it is ready). `load_tokenizer` runs once, in a
    thread, when the app starts. Without `store`, the one that `config` names is opened then.
    """
    metrics, limiter, keyring = Metrics(), Limiter(), ApiKeyCache(config.api_keys)
    gateway = Gateway(
        config=config,
        engine=engine,
        model_name=model_name,
        version=_version(),
        started_at=int(time.time()),
        metrics=metrics,
        limiter=limiter,
        door=AdmissionController(engine, limiter),
        keyring=keyring,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        opened = store if store is not None else await asyncio.to_thread(open_store, config)
        gateway.store = metered_store(opened, metrics)
        limiter.usage.store = opened.keys
        await keyring.open(opened.keys)
        loading = asyncio.create_task(gateway.load(load_tokenizer, gateway.store))
        tidying = asyncio.create_task(limiter.keep_tidy())
        try:
            yield
        finally:
            await keyring.close()
            await gateway.settle_runs()
            for task in (loading, tidying):
                task.cancel()
            await asyncio.gather(loading, tidying, return_exceptions=True)
            await limiter.tidy()
            await opened.close()

    app = Starlette(
        routes=protected(_routes()),
        middleware=_middleware(config, metrics, limiter, keyring),
        exception_handlers={ChatcacheError: on_chatcache_error, HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would repeat whatever Host it was asked by
    app.router.default = Unmatched(app.router.default)
    app.state.gateway = gateway
    return app


def _routes() -> list[BaseRoute]:
    return [
        Route("/", static.page),
        Mount("/assets", static.Assets(static.STATIC / "assets")),
        Route("/livez", health.livez),
        Route("/readyz", health.readyz),
        Route("/health", health.readyz),
        Route("/metrics", health.metrics),
        Route("/version", models.version),
        Route("/openapi.json", openapi),
        Route("/v1/session", sessions.Sessions),
        Route("/tokenize", models.tokenize, methods=["POST"]),
        Route("/detokenize", models.detokenize, methods=["POST"]),
        Route("/v1/models", models.list_models),
        Route("/v1/models/{id:path}", models.get_model),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        WebSocketRoute("/v1/responses", responses_socket),
        Route("/v1/responses", responses_http.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses_stored.InputTokens),
        Route("/v1/responses/{id}", responses_stored.OneResponse),
        Route("/v1/responses/{id}/cancel", responses_stored.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses_stored.input_items),
        Route("/v1/cache/explain", cache.explain, methods=["POST"]),
        Route("/v1/cache/accounts", cache.accounts),
        Route("/v1/cache/map", cache_pages.page_map),
        Route("/v1/cache/warmth", cache_pages.warmth, methods=["POST"]),
        Route("/v1/conversations", conversation_items.Conversations),
        Route("/v1/conversations/export", conversation_files.AllConversations),
        Route(IMPORT_PATH, conversation_files.Imports),
        Route("/v1/conversations/{id}", conversations.OneConversation),
        Route("/v1/conversations/{id}/export", conversation_files.export_one),
        Route("/v1/conversations/{id}/title", conversation_titles.name_conversation, methods=["POST"]),
        Route("/v1/conversations/{id}/items", conversation_items.Items),
        Route("/v1/conversations/{id}/items/{item_id}", conversation_items.OneItem),
        Route("/v1/conversations/{id}/items/{item_id}/tokens", message_tokens.list_tokens),
        Route("/v1/conversations/{id}/items/{item_id}/tokens/{index}", message_tokens.one_token),
        static.RootFiles(),
    ]


def _middleware(config: ServerConfig, metrics: Metrics, limiter: Limiter, keyring: ApiKeyCache) -> list[Middleware]:
    """Outermost first."""
    stack = [Middleware(RequestContext, metrics, limiter)]
    if config.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "idempotency-key", "x-request-id"],
                expose_headers=[
                    "x-request-id",
                    "x-chatcache-ignored",
                    "retry-after",
                    "idempotent-replayed",
                    *RATE_HEADERS,
                ],
            )
        )
    return [
        *stack,
        Middleware(AuthenticationMiddleware, config, keyring),
        Middleware(RevocationMiddleware, keyring),
        Middleware(BodyLimit, config.max_body_bytes, config.body_timeout_s, {IMPORT_PATH: config.max_import_bytes}),
    ]


def _version() -> str:
    try:
        return importlib.metadata.version("chatcache")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
