"""The ASGI application: engine, store, route table and middleware put together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES

from chatcache import __version__
from chatcache.config import ServerConfig
from chatcache.conversations.store import ConversationStore
from chatcache.engine.protocols import EngineClient, RecordingEngine
from chatcache.errors import ChatcacheError
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.auth.middleware import AuthenticationMiddleware, RevocationMiddleware
from chatcache.gateway.context import Gateway
from chatcache.gateway.errors import on_chatcache_error, on_http_exception
from chatcache.gateway.heap import HeapTrimmer
from chatcache.gateway.limits.admission import AdmissionController
from chatcache.gateway.limits.rate_limits import RATE_HEADERS, RateLimiter
from chatcache.gateway.mcp.servers import McpServers
from chatcache.gateway.metrics import Metrics, instrument_store
from chatcache.gateway.middleware import (
    BodyLimitMiddleware,
    CompressionMiddleware,
    ReadTurnsMiddleware,
    RequestContextMiddleware,
)
from chatcache.gateway.peers import Channel, GatewayPeers
from chatcache.gateway.responses.create import continue_response
from chatcache.gateway.responses.registry import Checkpointer
from chatcache.gateway.responses.run import LiveResponse
from chatcache.gateway.routes import ATTACHMENTS_PATH, IMPORT_PATH, ROUTES
from chatcache.gateway.routing import UnknownPath, build_routes
from chatcache.gateway.tracing import open_tracer
from chatcache.storage.open import open_store
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer.attachments import MAX_FILE_BYTES

MIN_COMPRESSED_BYTES = 1024
_COMPRESSION_LEVEL = 1  # a third of the time of the default, for a tenth more bytes
_NOT_COMPRESSED = ("text/*", "application/x-ndjson")  # lines are sent one by one; `static` compresses the page itself


def create_app(
    config: ServerConfig,
    engine: EngineClient,
    load_tokenizer: Callable[[], Tokenizer],
    model_name: str,
    *,
    store: ConversationStore | None = None,
    seed: int = 0,
) -> Starlette:
    """Build the application. The caller starts and stops the engine.

    `model_name`: the name that clients use; "" for the engine's own, which is available once the engine is ready.
    `load_tokenizer` runs once, in a thread, when the application starts. Without `store`, the application opens the
    store that `config` names when it starts. `seed`: base seed of requests without a seed.
    """
    metrics, limiter, key_cache = Metrics(), RateLimiter(), ApiKeyCache(config.api_keys)
    gateway = Gateway(
        config=config,
        engine=engine,
        model_name=model_name,
        version=__version__,
        started_at=int(time.time()),
        metrics=metrics,
        limiter=limiter,
        admission=AdmissionController(engine, limiter),
        key_cache=key_cache,
        mcp_servers=McpServers(config.mcp_servers),
        seed=seed,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        opened = store if store is not None else await asyncio.to_thread(open_store, config)
        gateway.store = instrument_store(opened, metrics)
        limiter.usage.store = opened.keys
        channel: Channel | None = getattr(opened, "channel", None)  # only a server can have several gateways
        if channel is not None:
            gateway.peers = GatewayPeers(
                channel,
                gateway.responses,
                gateway.hub,
                opened,
                limiter,
                lambda: gateway.loaded_model().tokenizer.token_bytes,
            )
            if isinstance(engine, RecordingEngine):
                gateway.recorder, gateway.peers.waits_for_takeover = engine.recorder, True
        await key_cache.open(opened.keys)
        metrics.tracer = tracer = open_tracer(lambda: gateway.model_name)
        loading = asyncio.create_task(_load(gateway, load_tokenizer, gateway.store))
        cleanup = asyncio.create_task(limiter.cleanup_loop())
        checkpoints = asyncio.create_task(Checkpointer(gateway.responses, gateway.store).loop())
        trimming = asyncio.create_task(HeapTrimmer().loop())
        listening = [asyncio.create_task(gateway.peers.run())] if gateway.peers is not None else []
        try:
            yield
        finally:
            await key_cache.close()
            await gateway.mcp_servers.close()
            await gateway.finish_runs()
            tasks = (loading, cleanup, checkpoints, trimming, *listening)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await limiter.cleanup()
            await opened.close()
            if tracer is not None:
                await tracer.close()

    app = Starlette(
        routes=build_routes(ROUTES),
        middleware=_middleware(config, metrics, limiter, key_cache),
        exception_handlers={ChatcacheError: on_chatcache_error, HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would echo the Host header of the request
    app.router.default = UnknownPath(app.router.default)
    app.state.gateway = gateway
    return app


async def _load(gateway: Gateway, load_tokenizer: Callable[[], Tokenizer], store: ConversationStore) -> None:
    """Load the tokenizer; from then on, responses of gateways that end can be taken over."""
    await gateway.load(load_tokenizer, store)
    if gateway.recorder is not None and gateway.peers is not None and gateway.model is not None:
        gateway.recorder.owns = gateway.peers.runs_here
        gateway.recorder.on_lost = partial(_abandon, gateway)
        gateway.recorder.on_adopt = partial(continue_response, gateway)


def _abandon(gateway: Gateway, response_id: str) -> None:
    for run in gateway.responses.running():
        if run.id == response_id and isinstance(run, LiveResponse):
            run.abandon()


def _middleware(
    config: ServerConfig, metrics: Metrics, limiter: RateLimiter, key_cache: ApiKeyCache
) -> list[Middleware]:
    """Build the middleware stack, outermost first."""
    stack: list[Middleware] = []
    if config.cors_origins:  # outermost, so that pages of these origins can read all errors
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],  # SDKs send many of their own, such as x-stainless-lang
                expose_headers=[
                    "x-request-id",
                    "request-id",
                    "x-chatcache-ignored",
                    "x-chatcache-max-tokens",
                    "retry-after",
                    "idempotent-replayed",
                    *RATE_HEADERS,
                ],
            )
        )
    file_bytes = {
        IMPORT_PATH: config.max_import_bytes,
        ATTACHMENTS_PATH: min(MAX_FILE_BYTES, config.max_import_bytes),
    }
    return [
        *stack,
        Middleware(RequestContextMiddleware, metrics, limiter),
        Middleware(
            CompressionMiddleware,
            minimum_size=MIN_COMPRESSED_BYTES,
            compresslevel=_COMPRESSION_LEVEL,
            exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, *_NOT_COMPRESSED),
        ),
        Middleware(AuthenticationMiddleware, config, key_cache),
        Middleware(RevocationMiddleware, key_cache),
        Middleware(ReadTurnsMiddleware),
        Middleware(BodyLimitMiddleware, config.max_body_bytes, config.body_timeout_s, file_bytes),
    ]
