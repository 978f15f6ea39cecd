"""Sampling without replacement: n distinct candidates by stochastic beam search.

Candidates are distinct as token sequences; two of them may still spell the same text.

Give every possible output y the value log p(y) + standard Gumbel noise: the n largest values are a sample without
replacement from p (the Gumbel top-k trick). The outputs need not be enumerated: the largest value below a prefix is
again log p(prefix) + Gumbel noise, so the values can be drawn from the root downwards. The children of a prefix get
noise of their own, then are shifted so that their maximum is the value of the prefix:

    value(child) = -log(exp(-value(parent)) - exp(-max of the perturbed children) + exp(-perturbed(child)))

A prefix that is not among the n largest at some length cannot be later on, so the search is exact.

The noise of a prefix is keyed by (seed, its tokens, position) only: a larger n starts with the candidates of a smaller
one, and results do not depend on batch, preemption or restart. The best child of the best prefix stays the best, so
candidate 0 is streamed token by token; it is an ordinary sample from p.

Source: Kool, van Hoof, Welling, "Stochastic Beams and Where to Find Them", ICML 2019; appendix B.3 for the numerics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from chatcache.decoding.grammar.state import Constraint, GrammarDeadEndError, GrammarState, advance_candidate
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.sampling import SamplerSpec
from chatcache.decoding.stopping import DEAD_END, START, StopProgress, StopResult, StopRules
from chatcache.decoding.token_tree import NO_SCORE, BranchReassignment, CandidateStream, Node, TokenTree
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Finish, Output, cannot_drop_error
from chatcache.types.events import FINISH_LENGTH, TokenLogprob
from chatcache.types.request import SamplingParams

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, eq=False)
class RankedPrefix:
    """One of the n best prefixes, finished or live.

    `score`: log-probability; `value`: perturbed score.
    """

    node: Node
    score: float
    value: float
    progress: StopProgress
    edits: LogitEdits
    spec: DrawSpec
    ended: StopResult | None = None
    grammar_state: GrammarState | None = None


class SelectedChild(NamedTuple):
    """One of the n best prefixes of a step, as a child of the prefix at `rank` in the step before.

    `token` is None if that prefix has ended: it is selected itself. `score` and `value` are those of the child.
    """

    rank: int
    token: int | None = None
    score: float = 0.0
    value: float = 0.0
    logprob: TokenLogprob | None = None


_SELECTED = msgspec.msgpack.Decoder(list[SelectedChild])


class DistinctStrategy:
    """Sample `n` distinct candidates without replacement by stochastic beam search.

    Candidates are ordered by log-probability plus Gumbel noise. Their reported score has no noise: it is the exact log-
    probability under the sampling distribution (after edits, temperature and filters); token logprobs are those of the
    model's log-softmax. If fewer than `n` outputs are possible, the missing candidates end without a token and with a
    score of -1e9.
    """

    def __init__(
        self,
        params: SamplingParams,
        rules: StopRules,
        *,
        seed: int,
        prompt: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._rules = rules
        self._constraint = constraint
        self._num_candidates = params.n
        self._with_logprobs = params.logprobs is not None
        width = min(max(params.n, 2), vocab_size)  # a draw of width 1 does not return its noise
        self._sampler_spec = SamplerSpec(params, rules, constraint, seed=seed, prompt=prompt, width=width)
        self._tree = TokenTree()
        self._stream = CandidateStream(self._tree, params.n, with_logprobs=self._with_logprobs)
        self._branches = BranchReassignment(self._tree.root)
        self._ranked = [
            RankedPrefix(self._tree.root, 0.0, 0.0, START, self._sampler_spec.edits, self._sampler_spec.spec)
        ]  # best value first
        self._live = {0: self._ranked[0]}  # by branch
        self._tree.root.num_refs += 1
        self._is_banned = False  # all tokens of a draw were banned
        self._num_streamed = 1
        self._num_done = 0

    @property
    def max_branches(self) -> int:
        return self._num_candidates

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def has_fixed_draws(self) -> bool:
        return False

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        prefix = self._live[branch]
        return (self._sampler_spec.draw_spec(prefix.spec, prefix),)

    def drop(self, index: int) -> DroppedCandidate | None:
        raise cannot_drop_error("distinct candidates")

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        return self._advance(self._select(drawn))

    def replay(self, record: bytes) -> Advance:
        return self._advance(_SELECTED.decode(record))

    def _advance(self, selected: list[SelectedChild]) -> Advance:
        before = self._ranked
        self._ranked = [self._child(before[each.rank], each) for each in selected]
        kept = set(self._ranked)
        for prefix in before:
            if prefix not in kept:
                self._tree.release(prefix.node)
        if all(prefix.ended is DEAD_END for prefix in self._ranked):
            raise GrammarDeadEndError(is_banned=self._is_banned)
        live = [prefix for prefix in self._ranked if prefix.ended is None]
        actions = self._branches.reassign([prefix.node for prefix in live])
        self._live = {prefix.node.branch: prefix for prefix in live}
        return Advance(actions, tuple(self._outputs()), not live, msgspec.msgpack.encode(selected))

    def _select(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> list[SelectedChild]:
        """Return the n best of the finished prefixes and the children of the live ones.

        This is a merge with a heap: each prefix offers its children in descending order. Ties keep their order.
        """
        offers = [(-prefix.value, rank, 0) for rank, prefix in enumerate(self._ranked)]  # already a heap
        best: list[SelectedChild] = []
        while offers and len(best) < self._num_candidates:
            negative, rank, place = heappop(offers)
            prefix = self._ranked[rank]
            candidates = drawn[prefix.node.branch][0] if prefix.ended is None else None
            if candidates is None or not candidates.tokens:
                best.append(SelectedChild(rank))
                continue
            score = prefix.score + candidates.logprobs[place]
            logprob = candidates.logprob_at(place) if self._with_logprobs else None
            best.append(SelectedChild(rank, candidates.tokens[place], score, -negative, logprob))
            place += 1
            if place < len(candidates.perturbed) and candidates.perturbed[place] > -math.inf:
                value = shift_to_maximum(
                    prefix.value,
                    prefix.score + candidates.perturbed[place],
                    ahead=candidates.perturbed[0] - candidates.perturbed[place],
                )
                heappush(offers, (-value, rank, place))
        return best

    def _child(self, prefix: RankedPrefix, selected: SelectedChild) -> RankedPrefix:
        """Return the selected child of `prefix`, or `prefix` itself if it has ended or has no child."""
        _, token, score, value, logprob = selected
        if token is None and prefix.ended is None:
            self._is_banned = prefix.node.ended = True
            prefix.node.num_refs += 1  # `prefix` gives up its own
            return replace(prefix, ended=DEAD_END)
        if token is None:
            return prefix
        node = self._tree.add(prefix.node, token, logprob)
        edits = prefix.edits.fork()
        edits.record(token)
        grammar_state = None if self._constraint is None else self._constraint.fork(prefix.grammar_state)
        progress, ended = advance_candidate(self._rules, prefix.progress, token, grammar_state)
        node.ended = ended is not None
        spec = replace(prefix.spec, seed=child_seed(prefix.spec.seed, token))
        return RankedPrefix(node, score, value, progress, edits, spec, ended, grammar_state)

    def _outputs(self) -> Iterator[Output]:
        """Emit tokens and ends that can no longer change.

        Finished candidates at the top are final, and the descendants of the first live prefix stay ahead of all
        others. All other candidates get the common prefix.
        """
        while self._num_done < len(self._ranked):
            index, prefix = self._num_done, self._ranked[self._num_done]
            yield from self._stream.emit(index, prefix.node)
            if prefix.ended is None:
                break
            yield Finish(index, prefix.ended.finish_reason, prefix.ended.stop_reason, prefix.score)
            self._num_done += 1
        self._num_streamed = max(self._num_streamed, len(self._ranked))
        if self._live:
            node = self._tree.advance_common_prefix()
            for index in range(self._num_done + 1, self._num_streamed):
                yield from self._stream.emit(index, node)
        else:
            yield from (Finish(i, FINISH_LENGTH, None, NO_SCORE) for i in range(self._num_done, self._num_candidates))


def shift_to_maximum(value: float, perturbed: float, *, ahead: float) -> float:
    """Shift a child's perturbed log-probability so that the maximum is `value`.

    `value`: perturbed log-probability of the parent. `ahead`: difference between the largest child and this one.
    """
    if ahead <= 0.0:
        return value
    v = value - perturbed + log1mexp(ahead)
    return value - max(0.0, v) - math.log1p(math.exp(-abs(v)))


def log1mexp(x: float) -> float:
    """Return log(1 - exp(-x)) for x > 0, accurate at both ends. Source: Maechler 2012."""
    return math.log(-math.expm1(-x)) if x <= math.log(2.0) else math.log1p(-math.exp(-x))


def child_seed(seed: int, token: int) -> int:
    """Return the seed of a prefix: a 64-bit hash of its parent's seed and its last token.

    Source: the finaliser of SplitMix64 (Steele et al. 2014), twice.
    """
    return _mix(_mix((seed + 0x9E3779B97F4A7C15) & _MASK) ^ (token + 1))


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
