"""`LLM`: batches of prompts in a script or notebook."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from chatcache.decoding.pooling import check_pooling
from chatcache.decoding.strategy import validate_params
from chatcache.engine.engine import Engine
from chatcache.errors import ChatcacheError, DeviceLostError, InvalidRequestError, OverloadedError
from chatcache.llm.base import LLMBase
from chatcache.llm.outputs import (
    Collector,
    EmbeddingCollector,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from chatcache.llm.prompts import EncodedPrompt, Message, Prompt, PromptSource, check_params_type
from chatcache.types.events import EngineEvent
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, PoolingParams, SamplingParams
from chatcache.types.stats import EngineHealth, ExplainQuery, Explanation, PageAccounts

Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)


class LLM(LLMBase):
    """A loaded model that answers batches of prompts.

    Calls of several threads that run prompts wait for one another; all other calls belong to one thread.
    The options are those of `LLMBase`. Pages of earlier calls stay cached, so a shared prefix is computed once.

    A prompt that cannot run or that fails does not affect the others: its output has an `error`. Errors that concern
    the whole call are raised before anything runs.
    """

    def _start(self) -> None:
        # No limit, because no client waits for the next token.
        self.config = msgspec.structs.replace(self.config, max_prefill_time_s=0.0)
        engine, self._runner = self._load_engine()
        self._open: Engine | None = engine
        self._is_running = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return the outputs in the order of the prompts.

        `priority`: one number per prompt, smaller is served sooner (with `scheduling_policy="priority"`).
        Raises: InvalidRequestError for parameters that are invalid for every prompt. A single prompt that cannot run
        (too long, an unknown token id, parameters of its own) has an `error` in its output.
        """
        return self._run(self._reader.prompts(prompts), sampling_params, use_tqdm, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Find the most likely continuations of each prompt, best first, each with its score.

        Groups, constraints and stop strings are fields of the params; `stream_beams` adds `live_beams` to the outputs.
        """
        params = BeamSearchParams() if params is None else params
        for one in params if isinstance(params, Sequence) else [params]:
            if not isinstance(one, BeamSearchParams):
                raise InvalidRequestError(f"params must be BeamSearchParams, got {type(one).__name__}", param="params")
        return self._run(self._reader.prompts(prompts), params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        `tools`, `tool_choice`: as in the Chat Completions API. The calls are in `tool_calls` of each candidate, its
        `text` is the rest of the reply, and a `strict` function or `tool_choice="required"` constrains the reply.
        `chat_template_kwargs`: variables of the template, such as `enable_thinking`.
        """
        sources = self._reader.chats(messages, tools, tool_choice, chat_template_kwargs)
        return self._run(sources, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt; return the outputs in the order of the prompts.

        Raises: InvalidRequestError for `dimensions` that the model does not have, or a model without embeddings.
        """
        pooling = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(pooling, PoolingParams):
            kind = type(pooling).__name__
            raise InvalidRequestError(f"pooling_params must be PoolingParams, got {kind}", param="pooling_params")
        check_pooling(pooling, self._engine.model_info)
        sources = self._reader.prompts(prompts)
        with self._is_running, _progress_bar(len(sources), is_shown=use_tqdm) as advance:
            batch = _Batch(self._engine, EmbeddingCollector, advance, pooling)
            return batch.run([(str(next(self._numbers)), each, SamplingParams(), 0) for each in sources])

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Return the cosine similarity of the embeddings of pairs of texts.

        One text in `data_1` is compared with each in `data_2`; lists of equal length pair by pair.
        """
        first, second = _texts("data_1", data_1), _texts("data_2", data_2)
        if not second or len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"data_1 must be one text, or as many as data_2: got {len(first)} and {len(second)}", param="data_1"
            )
        outputs = self.embed([*first, *second], use_tqdm=use_tqdm)
        partners = outputs[: len(first)] * (len(second) // len(first))
        return list(map(ScoringRequestOutput.of, partners, outputs[len(first) :]))

    def explain(self, prompt: Prompt) -> Explanation:
        """Report which part of a prompt is cached, and why not more; nothing is computed or stored.

        Raises: InvalidRequestError or ContextLengthError for a prompt that can never run.
        """
        encoded = self._reader.prompt(prompt)(SamplingParams())
        return self._engine.cache.explain(ExplainQuery(tuple(encoded.token_ids), operator=True))

    def accounts(self) -> PageAccounts:
        """Return how many pages each running request holds; none between calls of `generate`."""
        return self._engine.cache.page_accounts()

    def stats(self) -> Any:
        """Return how many pages are in use, idle, shared and wasted."""
        return self._engine.cache.stats()

    def health(self) -> EngineHealth:
        """Return the size of the KV memory and counters since the start.

        The counters are tokens, cache hits, preemptions, swaps and page copies.
        """
        return self._engine.health()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached pages; return False if some are in use."""
        return self._engine.cache.reset_prefix_cache()

    def close(self) -> None:
        """Release the model and its pages when no call runs; the object cannot be used afterwards."""
        with self._is_running:
            if self._open is not None:
                self._open.close()
                self._open = None
                self._runner.close()

    @property
    def _engine(self) -> Engine:
        if self._open is None:
            raise InvalidRequestError("this LLM was closed")
        return self._open

    def _run(
        self,
        sources: list[PromptSource],
        params: Params | Sequence[Params] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = SamplingParams() if params is None else params
        if isinstance(params, Sequence):
            each = list(params)
            for one in each:
                check_params_type(one)
        else:
            check_params_type(params)
            params = self._reader.resolve(params)
            validate_params(params, self._engine.model_info.vocab_size)
            each = [params] * len(sources)
        if len(each) != len(sources):
            raise InvalidRequestError(f"{len(sources)} prompts but {len(each)} params", param="sampling_params")
        self._check_logprobs(each, self._engine.model_info.vocab_size)
        self._check_priority(is_given=priority is not None)
        if priority is not None and not isinstance(priority, Sequence):
            raise InvalidRequestError(f"priority must be a list of integers, got {priority!r:.100}", param="priority")
        ranks = [0] * len(sources) if priority is None else list(priority)
        if len(ranks) != len(sources):
            raise InvalidRequestError(f"{len(sources)} prompts but {len(ranks)} priorities", param="priority")
        with self._is_running, _progress_bar(len(sources), is_shown=use_tqdm) as advance:
            batch = _Batch(self._engine, self._new_collector, advance)
            return batch.run([(str(next(self._numbers)), *one) for one in zip(sources, each, ranks, strict=True)])

    def _new_collector(self, request_id: str, prompt: EncodedPrompt) -> Collector:
        return Collector(request_id, prompt, self._tokenizer, self._token_text)


class _Collector(Protocol[Output_co]):
    """Collects the events of one request into its output."""

    @property
    def error(self) -> ChatcacheError | None: ...

    def reject(self, error: ChatcacheError) -> None: ...

    def take(self, event: EngineEvent) -> bool: ...

    def output(self) -> Output_co: ...


class _Batch(Generic[Output]):
    """The requests of one call: submitted as the engine's queue has space, collected as they end.

    `pooling`: embed the prompts.
    """

    def __init__(
        self,
        engine: Engine,
        new_collector: Callable[[str, EncodedPrompt], _Collector[Output]],
        advance: Callable[[int], None],
        pooling: PoolingParams | None = None,
    ) -> None:
        self._engine = engine
        self._new_collector = new_collector
        self._advance = advance
        self._pooling = pooling
        self._running: dict[str, _Collector[Output]] = {}
        self._outputs: dict[str, Output] = {}

    def run(self, requests: Sequence[tuple[str, PromptSource, Params, int]]) -> list[Output]:
        """Run requests (id, prompt, params, priority) to the end; return their outputs in this order.

        Raises: DeviceLostError, since no later request can run.
        """
        try:
            return self._run(requests)
        except BaseException:
            self._abandon()
            raise

    def _run(self, requests: Sequence[tuple[str, PromptSource, Params, int]]) -> list[Output]:
        requests_left = iter(requests)
        waiting = self._next(requests_left)
        while waiting is not None or self._engine.has_work():
            while waiting is not None and self._submit(*waiting):
                waiting = self._next(requests_left)
            for event in self._engine.step():
                collector = self._running.get(event.request_id)
                if collector is not None and collector.take(event):
                    self._finish(event.request_id, collector)
        return [self._outputs.pop(request_id) for request_id, *_ in requests]

    def _abandon(self) -> None:
        """Abort all requests after an error or Ctrl-C, so that the next call finds an idle engine."""
        for request_id in self._running:
            self._engine.abort(request_id)
        with suppress(DeviceLostError):
            while self._engine.has_work():
                self._engine.step()

    def _next(
        self, requests: Iterator[tuple[str, PromptSource, Params, int]]
    ) -> tuple[GenerateRequest, EncodedPrompt] | None:
        """Encode the next prompt; those that cannot be encoded end with an error."""
        for request_id, source, params, priority in requests:
            try:
                encoded = source(params)
            except ChatcacheError as error:
                self._reject(request_id, EncodedPrompt(None, (), params), error)
                continue
            request = GenerateRequest(
                request_id=request_id,
                prompt=encoded.token_ids,
                params=encoded.params,
                pooling=self._pooling,
                priority=priority,
            )
            return request, encoded
        return None

    def _submit(self, request: GenerateRequest, encoded: EncodedPrompt) -> bool:
        """Submit a request; return False if the queue is full."""
        try:
            self._engine.add(request)
        except OverloadedError:
            if self._engine.has_work():
                return False
            raise
        except ChatcacheError as error:
            self._reject(request.request_id, encoded, error)
        else:
            self._running[request.request_id] = self._new_collector(request.request_id, encoded)
        return True

    def _reject(self, request_id: str, encoded: EncodedPrompt, error: ChatcacheError) -> None:
        collector = self._new_collector(request_id, encoded)
        collector.reject(error)
        self._finish(request_id, collector)

    def _finish(self, request_id: str, collector: _Collector[Output]) -> None:
        self._running.pop(request_id, None)
        if isinstance(collector.error, DeviceLostError):
            raise collector.error
        self._outputs[request_id] = collector.output()
        self._advance(1)


def _texts(name: str, value: str | Iterable[str]) -> list[str]:
    texts = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if not all(isinstance(each, str) for each in texts):
        raise InvalidRequestError(f"{name} must be a text or a list of texts, got {value!r:.100}", param=name)
    return texts


@contextmanager
def _progress_bar(num_prompts: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield the function that adds finished prompts to a progress bar on standard error."""
    if not is_shown:
        yield lambda num_finished: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=num_prompts)
        yield lambda num_finished: progress.advance(task, num_finished)
