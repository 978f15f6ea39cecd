"""An engine without a model: its streams emit tokens by a clock, and tick times are stored."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Self

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from chatcache.config import EngineConfig
from chatcache.engine_process.loop import StepEngine
from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import CandidateDone, EngineEvent, Finished, SearchStep, Started, Tokens
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import (
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)
from loadtest.gateway.ticks import NUM_TICKS, TickClock, TickTimes, clock_from_environment, tick_text

NUM_BYTE_TOKENS = 257  # 256 bytes and the end of a turn
MAX_MODEL_LEN = 1 << 16
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def clock_tokenizer(config: EngineConfig) -> Tokenizer:
    """Return a tokenizer with bytes for prompts and one token for each tick."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|im_end|>", *(tick_text(tick).replace(" ", "Ġ") for tick in range(NUM_TICKS))]
    backend = Backend(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    template = ChatTemplate(_CHATML, origin="loadtest", variables={})
    return Tokenizer(backend, eos_token_ids=(NUM_BYTE_TOKENS - 1,), template=template)


class _Stream:
    """Progress of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.id = request.request_id
        self.num_prompt_tokens = len(request.prompt)
        self.num_left = request.params.max_tokens or MAX_MODEL_LEN
        self.num_tokens = 0
        self.seq = 0

    def next_number(self) -> int:
        self.seq += 1
        return self.seq


class ClockEngine:
    """An engine that emits tokens by a clock: a `StepEngine` and `CacheQueries` of `engine_process.loop`."""

    search_steps: Sequence[SearchStep] = ()
    invalid_grammars: Sequence[str] = ()

    def __init__(self, clock: TickClock, times: TickTimes) -> None:
        self.model_info = ModelInfo(
            name="clock",
            digest="00" * 32,
            vocab_size=NUM_BYTE_TOKENS + NUM_TICKS,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(NUM_BYTE_TOKENS - 1,),
        )
        self._clock, self._times = clock, times
        self._phases: list[dict[str, _Stream]] = [{} for _ in range(clock.num_phases)]
        self._phase_of: dict[str, int] = {}
        self._ended: list[EngineEvent] = []

    def add(self, request: GenerateRequest) -> None:
        phase = min(range(len(self._phases)), key=lambda each: len(self._phases[each]))
        self._phases[phase][request.request_id] = _Stream(request)
        self._phase_of[request.request_id] = phase

    def abort(self, request_id: str) -> None:
        phase = self._phase_of.pop(request_id, None)
        if phase is not None:
            self._ended.append(self._finished(self._phases[phase].pop(request_id), cancelled=True))

    def is_compiling_grammar(self, request_id: str) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self._phase_of or self._ended)

    def check_device(self) -> None:
        """Do nothing."""

    def pop_events(self) -> list[EngineEvent]:
        events, self._ended = self._ended, []
        return events

    def step(self) -> Sequence[EngineEvent]:
        """Wait for the next tick, then return the events of the streams that emit a token at it."""
        time.sleep(max(0.0, self._clock.delay_s()))
        tick = self._clock.advance()
        events = self.pop_events()
        streams = self._phases[tick % len(self._phases)]
        finished: list[_Stream] = []
        token = (NUM_BYTE_TOKENS + tick % NUM_TICKS,)
        for stream in streams.values():
            if not stream.num_tokens:
                events.append(Started(stream.id, stream.next_number(), stream.num_prompt_tokens, 0))
            events.append(Tokens(stream.id, stream.next_number(), 0, token))
            stream.num_tokens += 1
            if stream.num_tokens >= stream.num_left:
                finished.append(stream)
        for stream in finished:
            events += (CandidateDone(stream.id, stream.next_number(), 0, "length"), self._finished(stream))
            del streams[stream.id], self._phase_of[stream.id]
        self._times.record(tick)
        return events

    def _finished(self, stream: _Stream, *, cancelled: bool = False) -> Finished:
        num_prompt, num_tokens = stream.num_prompt_tokens, stream.num_tokens
        return Finished(stream.id, stream.next_number(), num_prompt, 0, num_tokens, num_tokens, cancelled)

    def health(self) -> EngineHealth:
        return EngineHealth(
            ready=True, model="clock", max_model_len=MAX_MODEL_LEN, page_size=16, num_running=len(self._phase_of)
        )

    @property
    def cache(self) -> Self:
        return self

    def explain(self, query: ExplainQuery) -> Explanation:
        return Explanation(num_tokens=len(query.prompt), num_cached_tokens=0, page_size=16, pages=())

    def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        return [0] * len(prompts)

    def cancel_candidate(self, request_id: str, index: int) -> None:
        return None

    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        return PageMap(page_size=16, num_pages=0, num_pages_per_cell=1, cells="")

    def page_accounts(self) -> PageAccounts:
        return PageAccounts(num_pages_in_use=0, page_bytes=0, requests={}, conversations={}, namespaces={}, states={})

    def stats(self) -> Any:
        return None

    def reset_prefix_cache(self) -> bool:
        return True


def build_engine(config: EngineConfig, progress: object) -> StepEngine:
    """Build the engine in the engine process, and pin it to a core other than the gateway's."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(os.getppid()) ^ set(range(os.cpu_count() or 1)), default=0)})
    return ClockEngine(*clock_from_environment())
