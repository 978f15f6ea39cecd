"""Random plans for a runner: branches start, decode, fork, are swapped out and in, and end.

The few pages are reused at once. A synchronous runner executes every plan, and its draws continue the branches. Another
runner is launched with the same plans, with placeholders for the tokens that it drew itself in the step before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from chatcache_kernels import reference
from torch import Tensor

from chatcache.model.attention import AttentionBackend, AttentionStep, allocate_stores
from chatcache.model.geometry import AttentionLayer, Geometry, KVShape
from chatcache.model.loading.loader import choose_sampler
from chatcache.model.runner import AsyncLaunch, Runner
from chatcache.model.streams import Streams
from chatcache.types.plan import (
    I32,
    PENDING_TOKEN,
    KVCapacity,
    LogitEdit,
    LogitMask,
    Rows,
    StepPlan,
    StepResult,
    edit_table,
)
from chatcache.types.stats import ModelInfo
from tests.model.drive import make_draws

VOCAB, HEADS, DIM, SIZE = 53, 2, 16, 8
LAYERS = (AttentionLayer(HEADS, KVShape(1, DIM)),) * 2
MIXED = (
    AttentionLayer(2, KVShape(1, 16)),
    AttentionLayer(2, KVShape(2, 16)),
    None,
    AttentionLayer(4, KVShape(1, 8)),
    AttentionLayer(2, KVShape(1, 16)),
    AttentionLayer(2, KVShape(2, 16), kv_layer=1),
)
CHUNKED = (*MIXED, AttentionLayer(2, KVShape(1, 16), chunk=16), AttentionLayer(4, KVShape(1, 8), chunk=24))
NUM_PAGES, NUM_HOST_PAGES, NUM_SLOTS, MAX_LEN = 40, 24, 9, 64
MODEL_INFO = ModelInfo(name="reader", digest="00", vocab_size=VOCAB, max_model_len=MAX_LEN, eos_token_ids=())


class Reader:
    """A network that reads its history back through pages.

    A row's logits depend on that row alone, to the bit. Each of `layers` has as many query elements as the default.
    """

    def __init__(
        self, max_tokens: int | None = None, device: str = "cpu", layers: Sequence[AttentionLayer | None] = LAYERS
    ) -> None:
        noise = torch.Generator().manual_seed(7)
        self.geometry = Geometry(tuple(layers), VOCAB, torch.float32, torch.device(device), HEADS * DIM)
        self._words = torch.randn(VOCAB, HEADS * DIM, generator=noise).to(device)
        self._max_tokens = max_tokens
        self.sizes: list[int] = []

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        x = self._states(tokens, positions, step)
        return self._head(x if drawn is None else x[drawn])

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        return self._states(tokens, positions, step)[wanted]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return self._head(hidden_states)

    def _states(self, tokens: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        self.sizes.append(len(tokens))
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            raise torch.OutOfMemoryError(f"{len(tokens)} tokens")
        x = self._words[tokens] + torch.sin(positions.float())[:, None]
        for layer, shape in enumerate(self.geometry.layers):
            if shape is None:
                continue
            heads = x.view(len(x), shape.num_heads, shape.kv.head_dim)
            k, v = heads[:, : shape.kv.num_kv_heads] * 0.5 + layer, heads[:, -shape.kv.num_kv_heads :].cos()
            x = x + step.attend(heads.contiguous(), k.contiguous(), v.contiguous(), layer, 0.3).reshape(len(x), -1)
        return x

    def _head(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(0, VOCAB)
        return torch.stack([0.15 * (self._words @ row) for row in x])  # row by row, so that no batch changes a bit


def make_runner(
    ahead: AsyncLaunch | None = None,
    streams: Streams | None = None,
    kernels: AttentionBackend = reference,
    network: Reader | None = None,
) -> Runner:
    """Return a runner of `Reader` with few pages of undefined contents."""
    network = network or Reader()
    stores = allocate_stores(kernels, network.geometry, NUM_PAGES, SIZE)
    for memory in (tensor for store in stores for tensor in store.tensors):
        memory.fill_(torch.nan)
    capacity = KVCapacity(NUM_PAGES, SIZE, NUM_SLOTS, MAX_LEN, num_host_pages=NUM_HOST_PAGES)
    backend = "triton" if "triton" in getattr(kernels, "__name__", "") else "reference"
    sampler = choose_sampler(backend, VOCAB, network.geometry.device)
    return Runner(network, kernels, stores, capacity, MODEL_INFO, ahead, streams, sampler)


@dataclass
class Branch:
    """The tokens of a branch, how many of them are computed, and their pages."""

    tokens: list[int]
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)


class Life:
    """Generates random plans. `decode_only`: probability of a step without prompts, half of which draw plainly."""

    def __init__(self, noise: np.random.Generator, decode_only: float = 0.7, swaps: bool = True) -> None:
        self.noise = noise
        self.decode_only = decode_only
        self.swaps = swaps
        self.branches: dict[int, Branch] = {}  # by slot
        self.away: list[Branch] = []
        self.free = list(range(1, NUM_PAGES))
        self.free_host = list(range(NUM_HOST_PAGES))
        self.refs: Counter[int] = Counter()
        self.num_steps = 0
        self.moves: dict[str, list[tuple[int, ...]]] = {}

    def plan(self) -> tuple[StepPlan, list[int]]:
        """Return the next plan and, for each of its rows, the slot."""
        self.moves = {name: [] for name in ("forks", "updates", "copies", "out", "back")}
        self.num_steps += 1
        self._come_and_go()
        decode_only = self.noise.random() < self.decode_only
        is_plain = decode_only and self.noise.random() < 0.5
        grants: list[tuple[int, int]] = []
        for slot, branch in list(self.branches.items()):
            missing = len(branch.tokens) - branch.num_computed
            count = missing if missing == 1 else int(self.noise.integers(1, missing + 1))
            if (decode_only and missing > 1) or self.noise.random() < 0.1 or not self._reserve(slot, branch, count):
                continue
            grants.append((slot, count))
        self.noise.shuffle(grants)
        return self._as_plan(grants, is_plain), [slot for slot, _ in grants]

    def take(self, plan: StepPlan, slots: list[int], result: StepResult) -> None:
        """Continue the branches with the first draw of each row."""
        for row, slot in enumerate(slots):
            branch = self.branches[slot]
            branch.num_computed += int(plan.rows.num_tokens[row])
            draws = np.flatnonzero(plan.draws.row == row)
            if len(draws):
                branch.tokens.append(int(result.tokens[draws[0], 0]))

    # -- what happens before the rows ---------------------------------------------------------------------------

    def _come_and_go(self) -> None:
        for slot, branch in list(self.branches.items()):
            if len(branch.tokens) > MAX_LEN - 3 or self.noise.random() < 0.04:
                self._release(self.branches.pop(slot).pages)
        if self.swaps and self.branches and self.noise.random() < 0.3:
            self._send_away(int(self.noise.choice(list(self.branches))))
        if self.away and len(self.branches) < NUM_SLOTS and self.noise.random() < 0.4:
            self._fetch()
        if self.branches and len(self.branches) < NUM_SLOTS and self.noise.random() < 0.3:
            self._fork(int(self.noise.choice(list(self.branches))))
        if len(self.branches) < NUM_SLOTS and self.noise.random() < 0.5:
            count = int(self.noise.integers(1, 20))
            self.branches[self._free_slot()] = Branch(self.noise.integers(0, VOCAB, count).tolist())

    def _send_away(self, slot: int) -> None:
        branch = self.branches[slot]
        if not branch.pages or len(branch.pages) > len(self.free_host):
            return
        del self.branches[slot]
        branch.host_pages = [self.free_host.pop() for _ in branch.pages]
        self.moves["out"] += list(zip(branch.pages, branch.host_pages, strict=True))
        self._release(branch.pages)
        branch.pages = []
        self.away.append(branch)

    def _fetch(self) -> None:
        branch = self.away[0]
        pages = self._allocate(len(branch.host_pages))
        if pages is None:
            return
        del self.away[0]
        fresh = {host for _, host in self.moves["out"]}
        self.moves["back"] += list(zip(branch.host_pages, pages, strict=True))
        self.free_host = [host for host in branch.host_pages if host not in fresh] + self.free_host
        slot = self._free_slot()
        self._place(slot, 0, pages)
        branch.pages, branch.host_pages = pages, []
        self.branches[slot] = branch

    def _fork(self, source: int) -> None:
        """Share the full pages of a branch and copy its partial page.

        A branch that was swapped in by the same plan is skipped.
        """
        parent = self.branches[source]
        full, tail = divmod(parent.num_computed, SIZE)
        copied = self._allocate(1) if tail else []
        if copied is None or any(page in parent.pages for _, page in self.moves["back"]):
            self._release(copied or [])
            return
        target = self._free_slot()
        self.moves["forks"].append((source, target, full + bool(tail)))
        pages = parent.pages[:full]
        self.refs.update(pages)
        if tail:
            self.moves["copies"].append((parent.pages[full], copied[0]))
            self._place(target, full, copied)
        self.branches[target] = Branch(list(parent.tokens), parent.num_computed, pages + copied)

    # -- pages ----------------------------------------------------------------------------------------------------

    def _reserve(self, slot: int, branch: Branch, num_tokens: int) -> bool:
        missing = -(-(branch.num_computed + num_tokens) // SIZE) - len(branch.pages)
        pages = self._allocate(missing) if missing > 0 else []
        if pages is None:
            return False
        self._place(slot, len(branch.pages), pages)
        branch.pages += pages
        return True

    def _place(self, slot: int, index: int, pages: list[int]) -> None:
        self.moves["updates"] += [(slot, index + number, page) for number, page in enumerate(pages)]

    def _allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        pages = [self.free.pop() for _ in range(count)]
        self.refs.update(pages)
        return pages

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] -= 1
            if not self.refs[page]:
                self.free.append(page)

    def _free_slot(self) -> int:
        return next(slot for slot in range(NUM_SLOTS) if slot not in self.branches)

    # -- the plan -------------------------------------------------------------------------------------------------

    def _as_plan(self, grants: list[tuple[int, int]], is_plain: bool) -> StepPlan:
        starts = [self.branches[slot].num_computed for slot, _ in grants]
        tokens = [
            token
            for (slot, count), start in zip(grants, starts, strict=True)
            for token in self.branches[slot].tokens[start : start + count]
        ]
        rows = Rows(
            np.array([slot for slot, _ in grants], np.int32),
            np.array(starts, np.int32),
            np.array([count for _, count in grants], np.int32),
            np.array(tokens, np.int32),
        )
        specs, edits, masks = [], [], []
        for row, (slot, count) in enumerate(grants):
            if starts[row] + count == len(self.branches[slot].tokens):
                specs.append(self._spec(row, starts[row] + count, is_plain))
                if not is_plain and self.noise.random() < 0.3:
                    edits.append(LogitEdit(len(specs) - 1, edit_table(self.noise.permutation(VOCAB)[:3], 1.0, 2.5)))
                if not is_plain and self.noise.random() < 0.2:
                    words = self.noise.integers(1, 1 << 32, -(-VOCAB // 32), np.uint32)
                    masks.append(LogitMask(len(specs) - 1, words))
        names = {name: np.array(pairs, np.int32) for name, pairs in self.moves.items()}
        return StepPlan(
            step=self.num_steps,
            forks=names["forks"].reshape(-1, 3),
            updates=names["updates"].reshape(-1, 3),
            copies=names["copies"].reshape(-1, 2),
            rows=rows,
            draws=make_draws(specs, edits, masks),
            swaps_out=names["out"].reshape(-1, 2),
            swaps_in=names["back"].reshape(-1, 2),
        )

    def _spec(self, row: int, position: int, is_plain: bool) -> dict[str, Any]:
        spec: dict[str, Any] = {"row": row, "seed": int(self.noise.integers(1 << 40)), "position": position}
        spec |= {"temperature": float(self.noise.choice([0.0, 0.8, 1.3])), "lane": int(self.noise.integers(3))}
        if not is_plain:
            spec |= {"width": int(self.noise.choice([1, 1, 2])), "num_top": int(self.noise.choice([0, 0, 2]))}
        if not is_plain or self.noise.random() < 0.1:
            spec["top_p"] = float(self.noise.choice([1.0, 0.9]))
        return spec


@dataclass
class Outcome:
    """Results of two runners for the same plans, and the number of placeholder tokens."""

    pairs: list[tuple[StepResult, StepResult]] = field(default_factory=list)
    num_unseen: int = 0

    def differing(self) -> int | None:
        """Return the first step whose results differ, None if there is none."""
        for number, (got, want) in enumerate(self.pairs):
            if not same(got, want):
                return number
        return None


def same(got: StepResult, want: StepResult) -> bool:
    """Return whether two results are equal, log-probabilities up to rounding."""
    names = ("tokens", "logprobs", "top_tokens", "top_logprobs", "perturbed", "raw_logprobs")
    for name in names:
        one, other = getattr(got, name), getattr(want, name)
        if one is None or other is None:
            if (one is None or not one.size) and (other is None or not other.size):
                continue
            return False
        if one.shape != other.shape or not np.allclose(one, other, atol=1e-4, rtol=1e-4, equal_nan=True):
            return False
    return got.faults == want.faults


def live(plain: Runner, ahead: Runner, life: Life, num_steps: int) -> Outcome:
    """Run the same plans on both runners; the second is always one step ahead of its results."""
    outcome, behind = Outcome(), None
    unseen: dict[int, int] = {}  # slot -> what it was drawn in the step before
    for _ in range(num_steps):
        plan, slots = life.plan()
        want = plain.execute(plan)
        rows = plan.rows
        tokens: I32 = rows.tokens.copy()
        ends = np.cumsum(rows.num_tokens)
        for row, slot in enumerate(slots):
            at = int(ends[row]) - 1
            if rows.num_tokens[row] == 1 and unseen.get(slot) == tokens[at]:
                tokens[at] = PENDING_TOKEN
                outcome.num_unseen += 1
        launched = ahead.launch(replace(plan, rows=replace(rows, tokens=tokens)))
        if behind is not None:
            outcome.pairs.append((behind[0].result(), behind[1]))
        behind = (launched, want)
        life.take(plan, slots, want)
        unseen = {
            slots[row]: int(want.tokens[draw, 0])
            for draw, row in enumerate(plan.draws.row.tolist())
            if plan.draws.width[draw] == 1
        }
    assert behind is not None
    outcome.pairs.append((behind[0].result(), behind[1]))
    return outcome
