"""`LLM`: the engine as a Python object, for scripts and notebooks.

Names and defaults of parameters and outputs are vLLM's.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypedDict

from chatcache import factory
from chatcache.config import PAGE_SIZES, EngineConfig, parse_size
from chatcache.engine.engine import Engine
from chatcache.errors import DeviceLostError, EngineError, InvalidRequestError, OverloadedError
from chatcache.tokenizer.chat_template import unescape
from chatcache.types.events import (
    Beams,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    LiveBeam,
    Started,
    TokenLogprob,
    Tokens,
)
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import EngineHealth, Explanation, PageAccounts

if TYPE_CHECKING:
    from chatcache.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token.

    `rank` counts from 1; None for a token that is not among the requested alternatives.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One candidate.

    `score` orders candidates: the cumulative log-probability, length-penalised for beams. `cumulative_logprob` is None
    for beams unless logprobs were requested. `logprobs` holds, per token, the chosen token and the alternatives by id.
    `text` is empty for a model without a tokenizer.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    score: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its candidates, best first for beams, `best_of` and `distinct`.

    `num_cached_tokens`: prompt tokens that were not recomputed. `prompt_logprobs`: per prompt token its own and the top
    log-probabilities by id, None for the first. `live_beams`: the live beams after each step, best first, if streamed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    live_beams: list[tuple[LiveBeam, ...]] | None = None


@dataclass(slots=True)
class _Candidate:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: CandidateDone | None = None


class Collector:
    """Collects the events of one request into its `RequestOutput`."""

    def __init__(self, request: GenerateRequest, prompt: str | None) -> None:
        self.request = request
        self._prompt = prompt
        self._candidates: dict[int, _Candidate] = {}
        self._num_cached = 0
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._live_beams: list[tuple[LiveBeam, ...]] = []

    def take(self, event: EngineEvent) -> bool:
        """Record an event; return whether it was the last.

        Raises: InvalidRequestError for a request that the engine rejected, EngineError for one that failed otherwise.
        """
        if isinstance(event, Started):
            self._num_cached = event.num_cached_tokens
            self._prompt_logprobs = event.prompt_logprobs
        elif isinstance(event, Beams):
            self._live_beams.append(event.beams)
        elif isinstance(event, Tokens):
            candidate = self._candidates.setdefault(event.index, _Candidate())
            candidate.token_ids += event.token_ids
            candidate.logprobs += event.logprobs
        elif isinstance(event, CandidateDone):
            self._candidates.setdefault(event.index, _Candidate()).done = event
        elif isinstance(event, Failed):
            fault = DeviceLostError if event.code == DeviceLostError.code else EngineError
            kind = InvalidRequestError if 400 <= event.status < 500 else fault
            raise kind(event.message, code=event.code, param=event.param)
        return isinstance(event, Finished)

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        params, prompt = self.request.params, self.request.prompt
        asked = params.prompt_logprobs is not None
        watched = isinstance(params, BeamSearchParams) and params.stream_beams
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt),
            outputs=[self._completion(index, tokenizer) for index in sorted(self._candidates)],
            num_cached_tokens=self._num_cached,
            prompt_logprobs=_logprobs(prompt, self._prompt_logprobs, tokenizer) if asked else None,
            live_beams=self._live_beams if watched else None,
        )

    def _completion(self, index: int, tokenizer: Tokenizer | None) -> CompletionOutput:
        candidate = self._candidates[index]
        done = candidate.done
        score = done.score if done else 0.0
        cumulative: float | None = score
        if isinstance(self.request.params, BeamSearchParams):
            cumulative = sum(each.logprob for each in candidate.logprobs) if candidate.logprobs else None
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self._text(candidate, tokenizer) if tokenizer else "",
            token_ids=candidate.token_ids,
            cumulative_logprob=cumulative,
            logprobs=_candidate_logprobs(candidate, tokenizer) if asked else None,
            finish_reason=done.finish_reason if done else None,
            stop_reason=done.stop_reason if done else None,
            score=score,
        )

    def _text(self, candidate: _Candidate, tokenizer: Tokenizer) -> str:
        from chatcache.tokenizer.detokenizer import IncrementalDetokenizer

        params = self.request.params
        stream = IncrementalDetokenizer(
            tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            self.request.prompt[-8:],
            stop_token_ids=(*tokenizer.eos_token_ids, *params.stop_token_ids),
            min_tokens=params.min_tokens,
        )
        stream.push(candidate.token_ids)
        stream.finish()
        return stream.text


def _candidate_logprobs(candidate: _Candidate, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    rows = _logprobs(candidate.token_ids, candidate.logprobs, tokenizer)
    return [row for row in rows if row is not None]


def _logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    def entry(token: int, logprob: float, rank: int | None) -> Logprob:
        text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None
        return Logprob(logprob, rank, text)

    rows: list[dict[int, Logprob] | None] = []
    for token, scored in zip(token_ids, entries, strict=True):
        if scored is None:
            rows.append(None)
            continue
        row = {other: entry(other, logprob, rank) for rank, (other, logprob) in enumerate(scored.top, start=1)}
        rows.append({token: row.pop(token, entry(token, scored.logprob, None)), **row})
    return rows


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    prompt: str


Prompt = str | Sequence[int] | TokensPrompt | TextPrompt
Message = dict[str, Any]


class LLM:
    """A loaded model that answers batches of prompts; use it from one thread.

    `model`: a folder, a Hugging Face id, or "" for the demo model. `kv_memory`: bytes or "2GiB"; None selects a share
    of free memory. Pages of earlier calls stay cached, so a shared prefix is computed once.

    `scheduling_policy`: fair (between namespaces; an `LLM` has only one, so it is fcfs) | fcfs | priority.
    `preemption_mode`: what to do when pages run out: auto | swap | recompute; `swap_space`: host memory for swapped
    pages, 0 for none. `deterministic`: logits do not depend, to the bit, on batch, chunking, cache or preemption;
    slower. `quantization`: None | "int8" for 8-bit weights on CPUs.
    """

    def __init__(
        self,
        model: str = "",
        *,
        device: str = "auto",
        dtype: str = "auto",
        attention_backend: str = "auto",
        quantization: str | None = None,
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        page_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fair",
        preemption_mode: str = "auto",
        swap_space: int | str | None = None,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        if page_size not in PAGE_SIZES:
            raise InvalidRequestError(
                f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {page_size!r}", param="page_size"
            )
        self.config = EngineConfig(
            model=str(model),
            device=device,
            dtype=dtype,
            attention_backend=attention_backend,
            quantization=quantization or "none",
            kv_memory_bytes=None if kv_memory is None else parse_size(kv_memory),
            max_model_len=max_model_len,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            preemption_mode=preemption_mode,
            swap_space_bytes=None if swap_space is None else parse_size(swap_space),
            deterministic=deterministic,
            seed=seed,
        )
        self._tokenizer = factory.load_tokenizer(self.config) if factory.has_tokenizer(self.config) else None
        self._runner = factory.load_runner(self.config)
        token_bytes, special_ids = (
            (self._tokenizer.token_bytes, self._tokenizer.special_ids) if self._tokenizer else (None, frozenset())
        )
        self._open: Engine | None = Engine(
            self._runner, self._runner.facts, self.config, token_bytes, special_ids=special_ids
        )
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer.

        Raises: InvalidRequestError for a model folder without one.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(f"{self.config.model}: this model has no tokenizer; pass token ids")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return the outputs in the order of the prompts.

        `priority`: one number per prompt, smaller is served sooner (with `scheduling_policy="priority"`).
        Raises: InvalidRequestError or ContextLengthError for the first request that can never run; no request has run
        then.
        """
        return self._run(self._prompts(prompts), sampling_params or SamplingParams(), use_tqdm, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Find the most likely continuations of each prompt, best first, each with its score.

        Groups, constraints and stop strings are fields of the params; `stream_beams` adds `live_beams` to the outputs.
        """
        return self._run(self._prompts(prompts), params or BeamSearchParams(), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        several: Any = [messages] if not messages or isinstance(messages[0], dict) else messages
        tokenizer = self.get_tokenizer()
        renderings = [tokenizer.render(chat) for chat in several]
        prompts: list[tuple[str | None, tuple[int, ...]]] = [
            (unescape(text), tuple(tokenizer.encode_rendered(text))) for text in renderings
        ]
        return self._run(prompts, sampling_params or SamplingParams(), use_tqdm)

    def explain(self, prompt: Prompt) -> Explanation:
        """Report which part of a prompt is cached, and why not more; nothing is computed or stored.

        Raises: InvalidRequestError or ContextLengthError for a prompt that can never run.
        """
        ((_, token_ids),) = self._prompts([prompt])
        return self._engine.cache.explain(token_ids, operator=True)

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
        """Release the model and its pages; the object cannot be used afterwards."""
        if self._open is not None:
            self._open.close()
            self._open = None
            self._runner.close()

    @property
    def _engine(self) -> Engine:
        if self._open is None:
            raise InvalidRequestError("this LLM was closed")
        return self._open

    def _prompts(self, prompts: Any) -> list[tuple[str | None, tuple[int, ...]]]:
        """Return the text (if given) and the token ids of each prompt."""
        single = isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: Any = [prompts] if single else prompts
        return [self._prompt(prompt) for prompt in several]

    def _prompt(self, prompt: Any) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
        if isinstance(prompt, str):
            return prompt, tuple(self.get_tokenizer().encode(prompt, add_special_tokens=True))
        if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
            return None, tuple(prompt)
        raise InvalidRequestError(
            "a prompt is text, token ids, or a dict with prompt_token_ids or prompt", param="prompts"
        )

    def _run(
        self,
        prompts: list[tuple[str | None, tuple[int, ...]]],
        params: Params | Sequence[Params],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(each)} params", param="sampling_params")
        if priority is not None and self.config.scheduling_policy != "priority":
            raise InvalidRequestError('priority needs scheduling_policy="priority"', param="priority")
        ranks = [0] * len(prompts) if priority is None else list(priority)
        if len(ranks) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(ranks)} priorities", param="priority")
        collectors = {}
        for (text, token_ids), one, rank in zip(prompts, each, ranks, strict=True):
            request = GenerateRequest(request_id=str(next(self._numbers)), prompt=token_ids, params=one, priority=rank)
            collectors[request.request_id] = Collector(request, text)
        try:
            self._drive(collectors, use_tqdm)
        except BaseException:
            self._abandon(collectors)
            raise
        return [collector.output(self._tokenizer) for collector in collectors.values()]

    def _drive(self, collectors: dict[str, Collector], use_tqdm: bool) -> None:
        """Submit the requests and run engine steps until all of them have ended."""
        waiting = deque(collectors.values())
        with _progress_bar(len(collectors), is_shown=use_tqdm) as advance:
            while waiting or self._engine.has_work():
                while waiting:
                    try:
                        self._engine.add(waiting[0].request)
                    except OverloadedError:
                        if not self._engine.has_work():
                            raise
                        break
                    waiting.popleft()
                for event in self._engine.step():
                    if event.request_id in collectors:
                        advance(collectors[event.request_id].take(event))

    def _abandon(self, collectors: dict[str, Collector]) -> None:
        """Abort all requests after an error or Ctrl-C, so that the next call finds an idle engine."""
        for request_id in collectors:
            self._engine.abort(request_id)
        with suppress(DeviceLostError):
            while self._engine.has_work():
                self._engine.step()


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
