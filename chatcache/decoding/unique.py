"""Sampling without replacement: n candidates, no two alike, by stochastic beam search on the same forks as beams.

Alike means token by token; two candidates may still spell the same text in different tokens.

Give every possible output y the value log p(y) + standard Gumbel noise: the n largest values are a sample without
replacement, as if one drew n times from p and struck out what had been drawn (the Gumbel top-k trick). No need to look
at every y: the largest value below a prefix is again log p(prefix) + Gumbel noise. So draw the values top down. The
children of a prefix whose value is known get noise of their own, then are shifted so that their maximum is that value:

    value(child) = -log(exp(-value(parent)) - exp(-max of the perturbed children) + exp(-perturbed(child)))

and whatever is not among the n largest at any length can never be. The search is exact, not an approximation.

The noise of a prefix is keyed by (seed, its tokens, position) alone. So a larger n begins with the candidates of a
smaller one, and nothing depends on batch, preemption or restart. The best child of the best prefix is always again the
best: candidate 0 is streamed token by token, an ordinary sample from p.

Source: Kool, van Hoof, Welling, "Stochastic Beams and Where to Find Them", ICML 2019; appendix B.3 for the numerics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from chatcache.decoding.grammar.state import Constraint, GrammarState, follow
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.sampling import SamplerSpec
from chatcache.decoding.stopping import START, Ended, StopRules, Trail
from chatcache.decoding.token_tree import NO_SCORE, BranchReassignment, Node, Stream, TokenTree
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Finish, Output, cannot_drop_error
from chatcache.types.events import FINISH_LENGTH
from chatcache.types.request import SamplingParams

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """One of the n best so far, finished (`ended`) or live. `score`: its log-probability, `value`: that plus noise."""

    node: Node
    score: float
    value: float
    trail: Trail
    edits: LogitEdits
    spec: DrawSpec
    ended: Ended | None = None
    guide: GrammarState | None = None


class DistinctStrategy:
    """Draw `n` different candidates, the best perturbed first; each scores its exact log-probability.

    That is the probability under the distribution drawn from, after edits, temperature and filters; a token's logprob
    is of the model's own log-softmax as everywhere. Where fewer than `n` outputs are possible, the missing ones end
    without a token and with a score of -1e9.
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
        width = min(max(params.n, 2), vocab_size)  # a draw of width 1 would not say its noise
        self._drawing = SamplerSpec(params, rules, constraint, seed=seed, prompt=prompt, width=width)
        self._tree = TokenTree()
        self._stream = Stream(self._tree, params.n, with_logprobs=self._with_logprobs)
        self._lineage = BranchReassignment(self._tree.root)
        self._ranked = [
            Prefix(self._tree.root, 0.0, 0.0, START, self._drawing.edits, self._drawing.spec)
        ]  # best value first
        self._live = {0: self._ranked[0]}  # by branch
        self._tree.root.num_holds += 1
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
        return (self._drawing.at(prefix.spec, prefix.edits, prefix.trail, prefix.guide),)

    def drop(self, index: int) -> DroppedCandidate | None:
        raise cannot_drop_error("distinct candidates")

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        before = self._ranked
        self._ranked = self._best(drawn)
        kept = set(self._ranked)
        for prefix in before:
            if prefix not in kept:
                self._tree.release(prefix.node)
        live = [prefix for prefix in self._ranked if prefix.ended is None]
        actions = self._lineage.move([prefix.node for prefix in live])
        self._live = {prefix.node.branch: prefix for prefix in live}
        return Advance(actions, tuple(self._outputs()), finished=not live)

    def _best(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> list[Prefix]:
        """Return the n best of the finished prefixes and of all children of the live ones.

        A merge: each prefix offers its children best first. Equal values stay in order.
        """
        offers = [(-prefix.value, rank, 0) for rank, prefix in enumerate(self._ranked)]  # already a heap
        best: list[Prefix] = []
        while offers and len(best) < self._num_candidates:
            negative, rank, place = heappop(offers)
            prefix = self._ranked[rank]
            if prefix.ended is not None:
                best.append(prefix)
                continue
            candidates = drawn[prefix.node.branch][0]
            best.append(self._child(prefix, candidates, place, -negative))
            place += 1
            if place < len(candidates.perturbed) and candidates.perturbed[place] > -math.inf:
                value = conditioned(
                    prefix.value,
                    prefix.score + candidates.perturbed[place],
                    ahead=candidates.perturbed[0] - candidates.perturbed[place],
                )
                heappush(offers, (-value, rank, place))
        return best

    def _child(self, prefix: Prefix, candidates: Candidates, place: int, value: float) -> Prefix:
        token, logprob = candidates.tokens[place], candidates.logprobs[place]
        node = self._tree.grow(prefix.node, token, candidates.logprob_at(place) if self._with_logprobs else None)
        edits = prefix.edits.fork()
        edits.record(token)
        guide = None if self._constraint is None else self._constraint.fork(prefix.guide)
        trail, ended = follow(self._rules, prefix.trail, token, guide)
        node.ended = ended is not None
        spec = replace(prefix.spec, seed=child_seed(prefix.spec.seed, token))
        return Prefix(node, prefix.score + logprob, value, trail, edits, spec, ended, guide)

    def _outputs(self) -> Iterator[Output]:
        """Emit what cannot change any more.

        Nothing can get ahead of finished candidates at the top, and whatever comes of the first live one stays first
        of the rest. All others are told what all have in common.
        """
        while self._num_done < len(self._ranked):
            index, prefix = self._num_done, self._ranked[self._num_done]
            yield from self._stream.tell(index, prefix.node)
            if prefix.ended is None:
                break
            yield Finish(index, prefix.ended.finish_reason, prefix.ended.stop_reason, prefix.score)
            self._num_done += 1
        self._num_streamed = max(self._num_streamed, len(self._ranked))
        if self._live:
            node = self._tree.agree()
            for index in range(self._num_done + 1, self._num_streamed):
                yield from self._stream.tell(index, node)
        else:
            yield from (Finish(i, FINISH_LENGTH, None, NO_SCORE) for i in range(self._num_done, self._num_candidates))


def conditioned(value: float, perturbed: float, *, ahead: float) -> float:
    """Shift a child's perturbed log-probability as it takes for the maximum of all children to be `value`.

    `value` is the parent's, `ahead` how much larger the largest perturbed log-probability among the children is.
    """
    if ahead <= 0.0:
        return value
    v = value - perturbed + log1mexp(ahead)
    return value - max(0.0, v) - math.log1p(math.exp(-abs(v)))


def log1mexp(x: float) -> float:
    """Return log(1 - exp(-x)) for x > 0, accurate at both ends. Source: Maechler 2012."""
    return math.log(-math.expm1(-x)) if x <= math.log(2.0) else math.log1p(-math.exp(-x))


def child_seed(seed: int, token: int) -> int:
    """Key the noise below a prefix by its tokens: scatter (seed of its parent, its last token) over 64 bits.

    Source: the finaliser of SplitMix64 (Steele et al. 2014), twice.
    """
    return _mix(_mix((seed + 0x9E3779B97F4A7C15) & _MASK) ^ (token + 1))


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
