"""Live requests and their branches, plain state that only the scheduler changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

import numpy as np

from chatcache.kv_cache.page_hash import TOKEN_BYTES, CacheScope, PageHashChain, encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import num_common_tokens
from chatcache.types.actions import Pooler, Strategy
from chatcache.types.events import CacheMiss, TokenLogprob
from chatcache.types.plan import I32
from chatcache.types.request import ForkPoint, ResumePoint

ARRIVAL_BITS = 31
MAX_TOKENS = 2**31 - 1

encode_token = Struct("<i").pack


@dataclass(slots=True, eq=False)
class Branch:
    """One sequence of tokens: the request's prompt and `outputs` (little-endian int32).

    `ordinal` is the branch's position among its siblings in order of creation. A branch without a `table` holds neither
    pages nor a row: it waits, together with its whole request, or to be forked again from its `fork_source`, the
    earlier branch with which it shares the most tokens (`num_shared_tokens`).
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
        self.outputs += encode_token(token)
        self.num_tokens += 1

    @property
    def last_token(self) -> int:
        """The newest output token."""
        return int.from_bytes(self.outputs[-TOKEN_BYTES:], "little", signed=True)

    def tokens(self) -> I32:
        """Return all tokens, prompt included. O(tokens)."""
        return np.frombuffer(self.request.prompt_bytes + self.outputs, dtype="<i4")

    def span(self, start: int, stop: int) -> bytes:
        """Return the tokens from `start` up to, not including, `stop` as little-endian int32."""
        prompt = self.request.prompt_bytes
        first, last = start * TOKEN_BYTES - len(prompt), stop * TOKEN_BYTES - len(prompt)
        if first >= 0:
            return bytes(self.outputs[first:last])
        head = prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        return head if last <= 0 else head + self.outputs[:last]

    def fork(self, child: int, token: int) -> Branch:
        """Return a new branch, without pages, with the same tokens followed by `token`."""
        outputs, ordinal = self.outputs + encode_token(token), self.request.num_branches_created
        self.request.num_branches_created += 1
        return Branch(child, self.request, outputs, self.num_tokens + 1, ordinal)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An accepted request and its branches, until the request ends.

    `arrival`: sequence number; smaller is older. `priority`: smaller is served first, before age is considered.
    `num_prompt_top`: how many alternative tokens to report for each prompt token, None for no prompt log-probabilities;
    `prompt_scores` are the reports so far, from prompt token `prompt_scores_start` on (0: the second). `pooler`: the
    strategy, if it pools hidden states.
    `explain`: record in `miss` why its first start did not find more in the cache. `resume_point`: where to continue a
    request of a failed engine, until it is queued. `host_pages`, `host_states`: those that it holds while preempted.
    `marks`: ascending numbers of prompt tokens after which other requests may continue in another way, see `snapshots`.
    `accepted_s`, `admitted_s` (first start) and `first_token_s` are values of `time.perf_counter`.

    While the request waits, `hash_chain` holds the page keys of its first branch. While it runs, `pending_keys` are the
    keys of the pages that it is computing, `num_waiting_branches` of its branches wait for pages or their fork source,
    and `num_batched` of them are in the decode batch. Before it was preempted it computed tokens from
    `num_matched_tokens` on, none by default.
    """

    request_id: str
    prompt: Sequence[int]
    namespace: str
    strategy: Strategy
    arrival: int
    num_public_tokens: int = 0
    cache_salt: str = ""
    conversation_id: str = ""
    priority: int = 0
    fork_of: ForkPoint | None = None
    num_prompt_top: int | None = None
    prompt_scores_start: int = 0
    pooler: Pooler | None = None
    explain: bool = False
    resume_point: ResumePoint | None = None
    marks: Sequence[int] = ()
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
    num_matched_tokens: int = MAX_TOKENS
    miss: CacheMiss | None = None
    num_copied_pages: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    host_states: list[int] = field(default_factory=list)
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
        return CacheScope(self.namespace, self.num_public_tokens, self.cache_salt)

    @property
    def service_order(self) -> int:
        """Sort key of requests: priority, then arrival. A signed number of at most 43 bits."""
        return (self.priority << ARRIVAL_BITS) + self.arrival

    @property
    def has_unscored_tokens(self) -> bool:
        """Whether prompt tokens still have to be scored."""
        return self.num_prompt_top is not None and self.num_before_scores < self.num_prompt_tokens - 1

    @property
    def num_before_scores(self) -> int:
        """Number of prompt tokens before the first whose successor still has to be scored."""
        return max(self.prompt_scores_start - 1, 0) + len(self.prompt_scores)

    @property
    def max_matched_tokens(self) -> int | None:
        """Limit on the tokens that may be matched; None for no limit.

        A prompt token whose successor still has to be scored must be computed, for its logits, and one whose hidden
        state is pooled, for that.
        """
        if self.has_unscored_tokens:
            return self.num_before_scores
        return None if self.pooler is None else self.pooler.max_matched_tokens

    @property
    def num_unbatched(self) -> int:
        """Number of branches that are not in the decode batch."""
        return len(self.branches) - self.num_batched

    @property
    def leader(self) -> Branch:
        """The branch that computes first when the request starts; the others fork from it."""
        return next(iter(self.branches.values()))

    @property
    def num_attached(self) -> int:
        """Number of branches with pages, of a running request."""
        return len(self.branches) - self.num_waiting_branches

    def tables(self) -> list[PageTable]:
        return [branch.table for branch in self.branches.values() if branch.table is not None]

    def choose_fork_sources(self) -> None:
        """Choose for every branch without pages the branch with which it shares most tokens.

        When the request starts again, its branches so share as many pages as before. A fork source has pages or is an
        earlier branch, so there are no cycles. The last token is never shared: a branch has to compute at least one
        token itself to be sampled.
        """
        candidates = [branch for branch in self.branches.values() if branch.table is not None]
        for branch in self.branches.values():
            if branch.table is not None:
                continue
            if branch.fork_source is not None and branch.fork_source.table is not None:
                candidates.append(branch)
                continue  # what they share does not change
            branch.fork_source, branch.num_shared_tokens = None, 0
            for other in candidates:
                num_common = self.num_prompt_tokens + num_common_tokens(branch.outputs, other.outputs)
                num_common = min(num_common, branch.num_tokens - 1, other.num_tokens - 1)
                if branch.fork_source is None or num_common > branch.num_shared_tokens:
                    branch.fork_source, branch.num_shared_tokens = other, num_common
            candidates.append(branch)
