"""`AsyncLLM`: concurrent requests with streamed outputs, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

from chatcache.engine.admission import check_request_id
from chatcache.engine.engine import Engine
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import OverloadedError
from chatcache.llm.base import LLMBase
from chatcache.llm.outputs import Collector, RequestOutput
from chatcache.llm.prompts import Message, Prompt, PromptSource, check_params_type
from chatcache.model.runner import Runner
from chatcache.types.request import GenerateRequest, Params, SamplingParams
from chatcache.types.stats import EngineHealth, ExplainQuery, Explanation

RETRY_S = 0.05


class AsyncLLM(LLMBase):
    """A model in a thread of its own that serves several requests at once; use it from one event loop.

    The options are those of `LLMBase`. Every output of a stream holds all tokens and text so far.

        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    The model is loaded by the first request, or when the object is entered.
    """

    def _start(self) -> None:
        self._loaded: tuple[Engine, Runner] | None = None
        self._engine = ThreadedEngine(self._load)
        # Requests beyond the engine's queue wait here, in order.
        self._open_requests = asyncio.Semaphore(self.config.max_queued_requests)

    async def __aenter__(self) -> Self:
        await self._engine.wait_loaded()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt and yield its output whenever it grows; the last one is `finished`.

        A cancelled task, and a generator that is closed early, aborts the request.
        Raises: InvalidRequestError or ContextLengthError for a request that can never run, EngineError for one that
        fails.
        """
        async for output in self._stream(self._reader.prompt(prompt), sampling_params, request_id, priority):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as `generate` and `LLM.chat`."""
        (source,) = self._reader.chats([messages], tools, tool_choice, chat_template_kwargs)
        async for output in self._stream(source, sampling_params, request_id, priority):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with the tokens so far. Unknown ids are ignored."""
        await self._engine.abort(request_id)

    async def explain(self, prompt: Prompt) -> Explanation:
        """Report which part of a prompt is cached, and why not more; nothing is computed or stored."""
        encoded = self._reader.prompt(prompt)(SamplingParams())
        return await self._engine.explain(ExplainQuery(tuple(encoded.token_ids), operator=True))

    async def health(self) -> EngineHealth:
        """Return the size of the KV memory and counters since the start."""
        return await self._engine.health()

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached pages; return False if some are in use."""
        return await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        """End all requests and release the model; the object cannot be used afterwards."""
        await self._engine.close()
        if self._loaded is not None:
            engine, runner = self._loaded
            self._loaded = None
            engine.close()
            runner.close()

    def _load(self) -> Engine:
        self._loaded = self._load_engine()
        return self._loaded[0]

    async def _stream(
        self, source: PromptSource, params: Params | None, request_id: str | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_priority(is_given=priority != 0)
        request_id = f"auto-{next(self._numbers)}" if request_id is None else request_id
        check_request_id(request_id)
        async with self._open_requests:
            params = SamplingParams() if params is None else params
            check_params_type(params)
            self._check_logprobs([params], (await self._engine.wait_loaded()).vocab_size)
            encoded = await asyncio.to_thread(source, params)
            await self._submit(
                GenerateRequest(
                    request_id=request_id, prompt=encoded.token_ids, params=encoded.params, priority=priority
                )
            )
            collector, is_last = Collector(request_id, encoded, self._tokenizer, self._token_text), False
            try:
                async for event in self._engine.events(request_id):
                    is_last = collector.take(event)
                    if collector.error is not None:
                        raise collector.error
                    yield collector.output()
            finally:
                if not is_last:
                    await self._engine.abort(request_id)

    async def _submit(self, request: GenerateRequest) -> None:
        """Submit a request, after waiting while the prompts in the engine's queue have too many tokens."""
        while True:
            try:
                return await self._engine.submit(request)
            except OverloadedError as error:
                if error.code != OverloadedError.code:
                    raise
            await asyncio.sleep(RETRY_S)
