"""A request while it lives, and its branches. Plain state: the scheduler alone changes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

import numpy as np

from chatcache.kv_cache.page_hash import TOKEN_BYTES, CacheScope, PageHashChain, encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.types.actions import Strategy
from chatcache.types.events import CacheMiss, TokenLogprob
from chatcache.types.plan import I32
from chatcache.types.request import ForkPoint, ResumePoint

ARRIVAL_BITS = 31

_INT32 = Struct("<i").pack


@dataclass(slots=True, eq=False)
class Branch:
    """One line of tokens: the request's prompt and `outputs` (little-endian int32). `ordinal` counts its siblings
    before it, in order of birth.

    Without a `table` the branch holds no pages and no slot: it waits, with its request or for its `partner`, the
    earlier branch with which it has most tokens (`num_common`) in common and from which it will fork again.
    """

    id: int
    request: LiveRequest
    outputs: bytearray = field(default_factory=bytearray)
    num_tokens: int = 0
    ordinal: int = 0
    in_decode_batch: bool = False
    table: PageTable | None = None
    slot: int = -1
    fork_source: Branch | None = None
    num_shared_tokens: int = 0

    def append(self, token: int) -> None:
        self.outputs += _INT32(token)
        self.num_tokens += 1

    def tokens(self) -> I32:
        """Return all tokens, prompt included. O(tokens)."""
        return np.frombuffer(self.request.prompt_bytes + self.outputs, dtype="<i4")

    def span(self, start: int, stop: int) -> bytes:
        """Return tokens start .. stop - 1 as little-endian int32."""
        prompt = self.request.prompt_bytes
        first, last = start * TOKEN_BYTES - len(prompt), stop * TOKEN_BYTES - len(prompt)
        if first >= 0:
            return bytes(self.outputs[first:last])
        head = prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        return head if last <= 0 else head + self.outputs[:last]

    def fork(self, child: int, token: int) -> Branch:
        """Return a branch of the same request that goes on with `token`; it has no pages yet."""
        twin = Branch(child, self.request, self.outputs[:], self.num_tokens, self.request.num_branches_created)
        self.request.num_branches_created += 1
        twin.append(token)
        return twin


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from acceptance to its end. `arrival` orders requests: a smaller one is older.

    `priority` goes before age: a smaller one is served first. `num_prompt_top`: how many alternatives to report for
    each prompt token, None for no report; `prompt_scores` are the reports so far, from the second token on.
    `num_worst_pages`: the most pages it can come to hold. `explain`: note what its first start misses
    (`miss`). `resumed`: where it is to go on, until it is queued. `host_pages`: what it holds of the host tier.
    `accepted_s`, `admitted_s` (for the first time) and `first_token_s` are of `time.perf_counter`.

    `chain` names the pages of the first branch while the request waits; `in_flight` holds the keys of those pages
    that are being computed now. While it runs, `num_waiting_branches` of its branches wait for their partner and
    `num_steady` of them are steady (see `sched.steady`).
    """

    request_id: str
    prompt: Sequence[int]
    namespace: str
    strategy: Strategy
    arrival: int
    num_public_tokens: int = 0
    conversation_id: str = ""
    priority: int = 0
    fork_of: ForkPoint | None = None
    num_prompt_top: int | None = None
    max_pages: int = 0
    explain: bool = False
    resume_point: ResumePoint | None = None
    max_branches: int = field(init=False)
    lockstep: bool = field(init=False)
    prompt_bytes: bytes = field(init=False)
    num_prompt_tokens: int = field(init=False)
    branches: dict[int, Branch] = field(init=False)
    hash_chain: PageHashChain | None = None
    pending_keys: frozenset[bytes] = frozenset()
    num_waiting_branches: int = 0
    num_batched: int = 0
    num_branches_created: int = 1
    started: bool = False
    num_cached_tokens: int | None = None
    miss: CacheMiss | None = None
    num_copied_pages: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    accepted_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0

    def __post_init__(self) -> None:
        self.max_branches = self.strategy.max_branches
        self.lockstep = self.strategy.lockstep
        self.prompt_bytes = encode_tokens(self.prompt)
        self.num_prompt_tokens = len(self.prompt)
        self.branches = {0: Branch(0, self, num_tokens=self.num_prompt_tokens)}

    @property
    def scope(self) -> CacheScope:
        return CacheScope(self.namespace, self.num_public_tokens)

    @property
    def service_order(self) -> int:
        """Who is served first: the smaller. A signed number of at most 43 bits."""
        return (self.priority << ARRIVAL_BITS) + self.arrival

    @property
    def max_matched_tokens(self) -> int | None:
        """How many computed tokens it may be given: none whose successor is yet to be scored; None if all."""
        if self.num_prompt_top is None or len(self.prompt_scores) == self.num_prompt_tokens - 1:
            return None
        return len(self.prompt_scores)

    @property
    def num_unbatched(self) -> int:
        return len(self.branches) - self.num_batched

    @property
    def leader(self) -> Branch:
        """The branch that computes first when the request (re)starts."""
        return next(iter(self.branches.values()))

    def tables(self) -> list[PageTable]:
        return [branch.table for branch in self.branches.values() if branch.table is not None]

    def choose_fork_sources(self) -> None:
        """Pair every branch without pages with the one it has most in common with, so that a restart shares as much.

        Partners have pages or come earlier, so there is no circle. The last token is never common: a branch must
        compute something of its own to be drawn.
        """
        candidates = [branch for branch in self.branches.values() if branch.table is not None]
        for branch in self.branches.values():
            if branch.table is not None:
                continue
            branch.fork_source, branch.num_shared_tokens = None, 0
            for other in candidates:
                num_common = min(num_common_tokens(branch, other), branch.num_tokens - 1, other.num_tokens - 1)
                if branch.fork_source is None or num_common > branch.num_shared_tokens:
                    branch.fork_source, branch.num_shared_tokens = other, num_common
            candidates.append(branch)


def num_common_tokens(a: Branch, b: Branch) -> int:
    """Count the leading tokens that two branches of one request share."""
    size = min(len(a.outputs), len(b.outputs))
    left, right = np.frombuffer(a.outputs[:size], "<i4"), np.frombuffer(b.outputs[:size], "<i4")
    different = np.flatnonzero(left != right)
    return a.request.num_prompt_tokens + (int(different[0]) if different.size else len(left))
