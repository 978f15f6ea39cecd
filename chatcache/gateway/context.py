"""State of the application that every handler uses: configuration, engine, store and model.

`PendingSaves` keeps responses that ended while the store was unavailable and saves them later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import HTTPConnection

from chatcache.config import ServerConfig
from chatcache.conversations.prompt import PromptLimits, SharedSystemPrompts
from chatcache.conversations.prompt_history import PromptHistory
from chatcache.conversations.replies.service import ChatService
from chatcache.conversations.store import ConversationStore, StoreUnavailableError
from chatcache.conversations.tree import ResponseElsewhereError
from chatcache.conversations.turns import ConversationPrompts, TurnService
from chatcache.engine.protocols import EngineClient, RequestRecorder
from chatcache.errors import ChatcacheError, NotFoundError, OverloadedError, UnsupportedParameterError
from chatcache.gateway.api.idempotency import KeyLocks
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.errors import GatewayUnreachableError, LogUnreachableError, ModelLoadingError
from chatcache.gateway.limits.admission import AdmissionController, LoopTurns, SocketLimiter, TextThrottle
from chatcache.gateway.limits.rate_limits import RateLimiter
from chatcache.gateway.mcp.servers import McpServers
from chatcache.gateway.metrics import Metrics
from chatcache.gateway.peers import GIVE_UP_S, GatewayPeers
from chatcache.gateway.responses.event_log import LogReader
from chatcache.gateway.responses.registry import LoggedResponse, ResponseRegistry
from chatcache.gateway.websocket.notifications import ConversationHub
from chatcache.tokenizer.reply_format import detect_format
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer.attachments import FileTexts
from chatcache.types.request import MAX_PRIORITY
from chatcache.types.stats import EngineHealth

log = logging.getLogger(__name__)

MAX_PENDING_SAVES = 1000
OPEN_S = 8.0  # for a stream to begin while another gateway does not answer; one that has begun waits `GIVE_UP_S`
_PAUSE_S = 0.5

Save = Callable[[], Awaitable[None]]


def moved_error() -> GatewayUnreachableError:
    """Return the error for readers of a response that another gateway runs now."""
    return GatewayUnreachableError("another gateway runs the response now; read it again")


@dataclass(frozen=True, slots=True)
class _PendingSave:
    names: frozenset[str]
    save: Save


class PendingSaves:
    """Retries failed saves. Belongs to one event loop.

    Beyond `MAX_PENDING_SAVES` the oldest are discarded.
    """

    def __init__(self) -> None:
        self._pending: dict[str, _PendingSave] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def add(self, response_id: str, names: Sequence[str], save: Save) -> None:
        """Keep a response to save it as soon as the store accepts it.

        `names`: ids that a later request may use to continue the response. `save` stores it.
        """
        self._pending[response_id] = _PendingSave(frozenset((response_id, *names)), save)
        log.warning("%s could not be saved yet; %d responses wait for the store", response_id, len(self._pending))
        if len(self._pending) > MAX_PENDING_SAVES:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            log.error("%s is lost: too many responses wait for the store", oldest)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._retry())

    async def flush(self, *names: str | None) -> None:
        """Try to save all pending responses now.

        `names`: ids that the caller is about to use. Raises: StoreUnavailableError if a response with one of them is
        still not saved.
        """
        if not self._pending:
            return
        try:
            await self._save_all()
        except StoreUnavailableError:
            if any(name in pending.names for pending in self._pending.values() for name in names):
                raise

    async def close(self) -> None:
        """Try to save once more, and log what is lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        finally:
            for response_id in self._pending:
                log.error("%s is lost: the store did not become available in time", response_id)

    async def _retry(self) -> None:
        while self._pending:
            await asyncio.sleep(_PAUSE_S)
            await self.flush()

    async def _save_all(self) -> None:
        """Save all in order. Raises: StoreUnavailableError at the first that fails."""
        async with self._lock:
            for response_id, pending in list(self._pending.items()):
                try:
                    await pending.save()
                except StoreUnavailableError:
                    raise
                except NotFoundError:
                    log.info("%s: its conversation was deleted before it could be saved", response_id)
                except ResponseElsewhereError:
                    log.info("%s: another gateway has ended it", response_id)
                except Exception:
                    log.exception("%s could not be saved", response_id)
                self._pending.pop(response_id, None)


FINISH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Model:
    """The served model: its tokenizer and the services that need one."""

    tokenizer: Tokenizer
    service: ChatService
    conversations: TurnService
    prompts: ConversationPrompts


@dataclass(slots=True)
class Gateway:
    """State of one application.

    `model` is None until the tokenizer is loaded; an empty `model_name` is then replaced by the engine's name. `peers`:
    the other gateways of the store; None if it has one gateway only. `recorder`: of the engine, if the other gateways
    can take requests over.
    """

    config: ServerConfig
    engine: EngineClient
    model_name: str
    version: str
    started_at: int
    metrics: Metrics
    limiter: RateLimiter
    admission: AdmissionController
    key_cache: ApiKeyCache
    mcp_servers: McpServers
    store: ConversationStore | None = None
    peers: GatewayPeers | None = None
    recorder: RequestRecorder | None = None
    model: Model | None = None
    load_error: str | None = None
    engine_seen_ready: bool = False
    max_model_len: int = 0
    seed: int = 0
    scheduling_policy: str = ""
    responses: ResponseRegistry = field(default_factory=ResponseRegistry)
    hub: ConversationHub = field(default_factory=ConversationHub)
    pending_saves: PendingSaves = field(default_factory=PendingSaves)
    prompt_limits: PromptLimits = field(default_factory=PromptLimits)
    idempotency_locks: KeyLocks = field(default_factory=KeyLocks)
    tokenize_throttle: TextThrottle = field(default_factory=TextThrottle)
    # The decoder holds the interpreter lock, so that a second body at the same time would only delay the event loop.
    decode_throttle: TextThrottle = field(default_factory=lambda: TextThrottle(1, "decoded"))
    share_renderings: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    pdf_throttle: TextThrottle = field(default_factory=lambda: TextThrottle(activity="read as PDFs"))
    pdf_texts: FileTexts = field(default_factory=FileTexts)
    socket_limiter: SocketLimiter = field(default_factory=SocketLimiter)
    loop_turns: LoopTurns = field(default_factory=LoopTurns)
    prompt_history: PromptHistory = field(default_factory=PromptHistory)
    openapi: bytes | None = None
    _load_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _interrupted: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether no API key exists, so that every request is accepted without one."""
        return self.key_cache.is_open

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes with the server version."""
        return f"chatcache-{self.version}"

    async def load(self, load_tokenizer: Callable[[], Tokenizer], store: ConversationStore) -> None:
        """Load the tokenizer in a thread. Store a failure in `load_error`, which `/readyz` reports."""
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer)
            await asyncio.to_thread(lambda: tokenizer.vocab_size)  # computes the token bytes once, off the loop
        except ChatcacheError as error:
            log.debug("the tokenizer did not load: %s", error.message)  # the engine reports the same error
            self.load_error = error.message
        except Exception as error:
            log.exception("the tokenizer did not load")
            self.load_error = f"the tokenizer did not load ({type(error).__name__})"
        else:
            shared_prompts = SharedSystemPrompts(self.config.shared_system_prompts)
            reply_format = detect_format(tokenizer, self.config.tool_call_parser, self.config.reasoning_parser)
            self.prompt_limits.max_token_chars = max(map(len, tokenizer.token_bytes), default=0)
            service = ChatService(
                self.engine,
                tokenizer,
                shared_prompts=shared_prompts,
                reply_format=reply_format,
                limits=self.prompt_limits,
                seed=self.seed,
            )
            conversations = TurnService(
                store, tokenizer, shared_prompts, reply_format, service.token_memo, self.prompt_limits
            )
            self.model = Model(tokenizer, service, conversations, ConversationPrompts(conversations))
        self._load_ended.set()

    async def wait_loaded(self) -> None:
        """Wait until the tokenizer is loaded. Raises: ModelLoadingError if it did not load."""
        await self._load_ended.wait()
        self.loaded_model()

    def opened_store(self) -> ConversationStore:
        """Return the store. Raises: OverloadedError before it is open."""
        if self.store is None:
            raise OverloadedError("the server is still starting")
        return self.store

    async def find_response(self, owner: str, response_id: str, *, ended: bool = False) -> LoggedResponse | None:
        """Return a response that runs or recently ended here, or that runs on another gateway.

        `ended`: also one that recently ended on another gateway. Raises: GatewayUnreachableError,
        StoreUnavailableError.
        """
        await self.responses.wait_restored(response_id)
        found = self.responses.find(owner, response_id)
        if found is None and self.peers is not None:
            found = await self.peers.find(owner, response_id, ended=ended)
        return found

    def remove_log(self, owner: str, response_id: str) -> None:
        """Remove the events of an ended response from all gateways, because it or its output was deleted."""
        self.responses.remove(response_id)
        if self.peers is not None:
            self.peers.publish_removal(owner, response_id)

    async def find_caught_up(
        self, owner: str, response_id: str, after: int = -1, *, is_read: bool = False
    ) -> LoggedResponse | None:
        """Return a running or recently ended response of any gateway, with all events that a client may have.

        `after`: number of the last one that the client has. Tries again for `OPEN_S` while the gateway that runs the
        response does not answer; `is_read`, for a stream that has begun: for `GIVE_UP_S`, also while the store does
        not, or a gateway that may have the events of a response that has ended. None if no gateway has them.

        Raises: GatewayUnreachableError, StoreUnavailableError.
        """
        awaited = (GatewayUnreachableError, StoreUnavailableError) if is_read else (GatewayUnreachableError,)
        deadline_s = time.monotonic() + (GIVE_UP_S if is_read else OPEN_S)
        while True:
            try:
                found = await self.find_response(owner, response_id, ended=True)
                if found is not None and found.log.failure is not None:
                    raise moved_error()
                if found is not None:
                    await found.catch_up(after)
                return found
            except awaited as error:
                if isinstance(error, LogUnreachableError) and not is_read:
                    return None
                if self.admission.is_closed or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def reopen(self, owner: str, reader: LogReader) -> tuple[LoggedResponse, LogReader]:
        """Return a response from the gateway that has taken it over, and a reader from the same place on.

        Raises: ChatcacheError.
        """
        found, after = None, reader.sent_number
        if not self.admission.is_closed:
            found = await self.find_caught_up(owner, reader.response_id, after, is_read=True)
        if found is None:
            raise moved_error()
        return found, found.log.reader(after, extended=reader.is_extended)

    async def health(self) -> EngineHealth:
        """Return the engine's health, and cache the limits and names that it contains."""
        health = await self.engine.health()
        if health.ready:
            self.engine_seen_ready = True
            self.max_model_len = self.prompt_limits.max_model_len = health.max_model_len
            self.scheduling_policy = health.scheduling_policy
            self.model_name = self.model_name or health.model
        return health

    async def require_model(self, name: str | None) -> Model:
        """Return the model that a request names; None means the served one.

        Raises: ModelLoadingError until model and engine are ready; NotFoundError for another model name.
        """
        model = self.loaded_model()
        if not self.engine_seen_ready and not (health := await self.health()).ready:
            detail = f" ({health.detail})" if health.detail else ""
            raise ModelLoadingError(f"the model is still loading{detail}")
        self.check_model(name)
        return model

    def loaded_model(self) -> Model:
        """Return the model. Raises: ModelLoadingError until its tokenizer is loaded."""
        if self.model is None:
            raise ModelLoadingError(self.load_error or "the model is still loading")
        return self.model

    @property
    def lowest_priority(self) -> int:
        """Priority of background work; 0 if the scheduler ignores priorities."""
        return MAX_PRIORITY if self.scheduling_policy == "priority" else 0

    def priority(self, wanted: int | None) -> int:
        """Validate the priority of a request.

        Raises: UnsupportedParameterError if the scheduler ignores priorities.
        """
        if wanted and self.scheduling_policy != "priority":
            raise UnsupportedParameterError(
                "priority needs a server with --scheduling-policy priority", param="priority"
            )
        return wanted or 0

    async def finish_runs(self) -> None:
        """Interrupt all running responses and wait until their text is stored."""
        await self.interrupt(FINISH_TIMEOUT_S)
        await self.pending_saves.close()

    def drain(self) -> None:
        """Reject new requests and those of gateways that have ended; running ones continue."""
        self.admission.close()
        if self.recorder is not None:
            self.recorder.on_adopt = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        num_live = self.model.service.num_live if self.model is not None else 0
        return not num_live and self.admission.is_idle and not self.responses.running()

    async def interrupt(self, timeout_s: float) -> None:
        """End all running responses and wait until their text is stored.

        A response that did not end within `timeout_s` is not interrupted again.
        """
        runs = [run for run in self.responses.running() if run.id not in self._interrupted]
        self._interrupted.update(run.id for run in runs)
        ends = [asyncio.create_task(run.interrupt()) for run in runs]
        if self.model is not None:
            await self.model.service.abort_live(except_for={run.id for run in runs})
        if ends:
            _, unfinished = await asyncio.wait(ends, timeout=timeout_s)
            for end in unfinished:
                end.cancel()

    def check_model(self, name: str | None) -> None:
        """Check a model name, if any. Raises: NotFoundError for another name than the served one."""
        if name:
            self.check_model_id(name)

    def check_model_id(self, name: str) -> None:
        """Check the id of a model. Raises: NotFoundError for another id than that of the served one."""
        if name != self.model_name:
            message = f"no model {name!r}; this server has {self.model_name!r}"
            raise NotFoundError(message, param="model", code="model_not_found")


def gateway_of(connection: HTTPConnection) -> Gateway:
    """Return the application state of a request or socket."""
    return cast(Gateway, connection.app.state.gateway)
