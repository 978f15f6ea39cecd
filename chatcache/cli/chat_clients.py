"""Chat clients of `chatcache chat`: an engine in this process, or a server reached by URL.

Both yield the same pieces: `TextDelta` for each part of a candidate's text, then one `Usage`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from chatcache import factory
from chatcache.config import EngineConfig
from chatcache.conversations.prompt import Message
from chatcache.conversations.replies.events import ReplyDelta, ReplyFinished
from chatcache.conversations.replies.service import ChatService
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import ChatcacheError, EngineError
from chatcache.types.request import GenerateRequest, SamplingParams

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next part of the text of candidate `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer, yielded after its text."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class ChatClient(Protocol):
    """A model that answers a conversation; `name` is shown to the user."""

    name: str

    def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        """Stream the text of all candidates as they are generated, then the usage.

        Raises: ChatcacheError with a message for the user.
        """
        ...

    async def close(self) -> None: ...


class LocalChatClient:
    """Runs the engine in a thread of this process, through the gateway's chat service."""

    def __init__(self, service: ChatService, engine: ThreadedEngine, name: str) -> None:
        self.name = name
        self._service = service
        self._engine = engine
        self._numbers = itertools.count()

    @classmethod
    async def load(cls, config: EngineConfig, progress: factory.Progress) -> LocalChatClient:
        """Load the model.

        Raises: ModelFolderError.
        """
        engine = ThreadedEngine(lambda: factory.build_engine(config, progress))
        await engine.wait_loaded()
        return cls(ChatService(engine, factory.load_tokenizer(config)), engine, factory.served_name(config))

    async def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        prompt = await self._service.prompt(messages, "")
        request = GenerateRequest(request_id=f"chat-{next(self._numbers)}", prompt=prompt.token_ids, params=params)
        async with await self._service.start(request, prompt.text) as reply:
            async for event in reply.events():
                if isinstance(event, ReplyDelta):
                    yield TextDelta(event.index, event.text)
                elif isinstance(event, ReplyFinished):
                    yield Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)

    async def close(self) -> None:
        await self._engine.close()


class HttpChatClient:
    """Uses a server with OpenAI's chat completions API; only chatcache reports cached tokens."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(base_url=f"{self._url}/v1/", headers=headers, timeout=timeout)
        self.name = ""

    async def connect(self) -> None:
        """Request the name of the server's model.

        Raises: EngineError if the server cannot be reached or returns an error.
        """
        try:
            response = await self._client.get("models")
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {error or type(error).__name__}") from None
        if response.is_error:
            raise _http_error(response.status_code, response.content)
        self.name = response.json()["data"][0]["id"]

    async def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        body = {
            "model": self.name,
            "messages": list(messages),
            "n": params.n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if params.max_tokens is None else {"max_tokens": params.max_tokens}),
            **({} if params.seed is None else {"seed": params.seed}),
        }
        try:
            async with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    raise _http_error(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    for piece in _parse_line(line):
                        yield piece
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {error or type(error).__name__}") from None

    async def close(self) -> None:
        await self._client.aclose()


def _parse_line(line: str) -> list[TextDelta | Usage]:
    """Parse one line of the event stream.

    Raises: EngineError for an error event.
    """
    if not line.startswith("data: ") or line == "data: [DONE]":
        return []
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise EngineError(chunk["error"]["message"])
    pieces: list[TextDelta | Usage] = [
        TextDelta(choice["index"], choice["delta"]["content"])
        for choice in chunk.get("choices", ())
        if choice["delta"].get("content")
    ]
    usage = chunk.get("usage")
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        pieces.append(Usage(usage["prompt_tokens"], cached, usage["completion_tokens"]))
    return pieces


def _http_error(status: int, body: bytes) -> ChatcacheError:
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = "no error message in the response"
    return EngineError(f"HTTP {status}: {message}")
