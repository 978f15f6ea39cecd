"""An engine without torch whose model reads its prompt from the KV pages and replies as `tagged_text` defines.

Pages hold the tokens in addition to the hashes of `FakeRunner`, and both are copied together. A request that reads a
page of another request, or one that is not written yet, generates text that no client requested.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.plan import F32, I32, U64, KVCapacity, StepPlan, StepResult
from tests.chaos.tagged_text import TAG, choices_at
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

STEP_S = "CHAOS_STEP_S"
MAX_MODEL_LEN = 1024
_NUM_PAGES, _PAGE_SIZE, _NUM_HOST_PAGES = 640, 8, 64
_SPECIALS = ("<|im_start|>", "<|im_end|>")
_START, _END, _HOLE = "\u2401", "\u2402", "\u2403"  # special tokens, and cells that hold no token
_HEADER = "assistant\n"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer with a token per byte and the special tokens of turns."""
    names = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIALS))
    template = ChatTemplate(_TEMPLATE, origin="chaos", variables={"eos_token": ""})
    return Tokenizer(backend, eos_token_ids=(names.index("<|im_end|>"),), template=template)


class TaggedTextRunner(FakeRunner):
    """Generates the reply that its pages ask for. Satisfies `ModelRunner`."""

    def __init__(self, capacity: KVCapacity, *, delay_s: float = 0.0) -> None:
        words = tokenizer()
        super().__init__(capacity, words.vocab_size, words.eos_token_ids[0], delay_s=delay_s)
        self._start, self._end = (words.special_ids_of(_SPECIALS)[name] for name in _SPECIALS)
        self._text = [piece.decode("latin-1") if len(piece) == 1 else _HOLE for piece in words.token_bytes]
        self._text[self._start], self._text[self._end] = _START, _END
        self._ids_of = {text: index for index, text in enumerate(self._text)}
        self.tokens: I32 = np.full(self.cells.shape, -1, np.int32)
        self.host_tokens: I32 = np.full(self.host_cells.shape, -1, np.int32)
        self._log: dict[int, str] = {}  # in this step, by the hash of the history

    def execute(self, plan: StepPlan) -> StepResult:
        for page, host_page in plan.swaps_out.tolist():
            self.host_tokens[host_page] = self.tokens[page]
        for host_page, page in plan.swaps_in.tolist():
            self.tokens[page] = self.host_tokens[host_page]
        for src, dst in plan.copies.tolist():
            self.tokens[dst] = self.tokens[src]
        return super().execute(plan)

    def _compute(self, plan: StepPlan) -> list[U64]:
        histories = super()._compute(plan)  # which updates the block tables
        rows = plan.rows
        spans = list(zip(rows.slot.tolist(), rows.start.tolist(), rows.num_tokens.tolist(), strict=True))
        before = [self._read_tokens(slot, start) for slot, start, _ in spans]
        self._log.clear()
        offset = 0
        for (slot, start, count), read, history in zip(spans, before, histories, strict=True):
            tokens = rows.tokens[offset : offset + count]
            offset += count
            positions = np.arange(start, start + count)
            pages = self._tables[slot, positions // self._capacity.page_size]
            self.tokens[pages, positions % self._capacity.page_size] = tokens
            ids = [*read.tolist(), *tokens.tolist()]
            self._log[int(history[-1])] = "".join(self._text[token] if token >= 0 else _HOLE for token in ids)
        return histories

    def _read_tokens(self, slot: int, num_tokens: int) -> I32:
        pages = self._tables[slot, : -(-num_tokens // self._capacity.page_size)]
        read: I32 = self.tokens[pages].reshape(-1)[:num_tokens]
        return read

    def logits(self, history: np.uint64) -> F32:
        """Return logits that allow only the next characters of the reply, all equally likely."""
        logits = np.full(len(self._text), -60.0, np.float32)
        for character in next_of(self._log.get(int(history), "")):
            logits[self._ids_of[character]] = 12.0
        return logits


def next_of(chat: str) -> str:
    """Return the characters that may follow a chat in this model's notation."""
    turns = chat.split(_START)
    users = [TAG.search(turn) for turn in turns if turn.startswith("user\n")]
    if not users or not turns[-1].startswith(_HEADER) or None in users:
        return "?"
    tags = [found[1] for found in users if found]
    last = users[-1]
    assert last is not None
    return choices_at(tags, int(last[2]), len(turns[-1]) - len(_HEADER)) or _END


def build_engine(config: EngineConfig, progress: Callable[[float, str], None]) -> Engine:
    """Build the engine of the engine process: few pages, so that pages are evicted and requests preempted."""
    words = tokenizer()
    capacity = fake_capacity(_NUM_PAGES, _PAGE_SIZE, max_model_len=MAX_MODEL_LEN, num_host_pages=_NUM_HOST_PAGES)
    runner = TaggedTextRunner(capacity, delay_s=float(os.environ.get(STEP_S, "0")))
    model_info = fake_model_info(words.vocab_size, words.eos_token_ids, MAX_MODEL_LEN)
    return Engine(runner, model_info, config, words.token_bytes, special_ids=words.special_ids)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    return tokenizer()
