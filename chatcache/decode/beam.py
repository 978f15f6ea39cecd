"""Beam search on forks: a child shares its parent's pages, losers are retired, one child inherits.

Follows `transformers.generate(num_beams=...)` (version 5) in what it keeps and when it stops:

- each step ranks the best K = max(2, 1 + E) * width continuations of all live beams together by summed log-softmax
  (float32, in beam order), E being the number of token ids that end a hypothesis;
- a continuation that ends becomes a hypothesis only if it ranks within the first `width`; the best `width` that do not
  end live on;
- a hypothesis scores sum(log p) / num_tokens ** length_penalty, its last token (EOS too) counted; the best `width` are
  kept;
- it stops when nothing lives on, or `width` hypotheses exist and `early_stopping` is True, or the best live beam could
  not beat the worst of them: at its present length (False), at `max_tokens` if length_penalty > 0 ("never").

Differences, all where transformers would return or extend a sequence of score -1e9: beams that hit a stop are never
extended, and a vocabulary smaller than the width yields fewer live beams. Stop strings are matched in the output only.
`min_tokens` leaves terminal ids out without renormalising the rest, as `min_new_tokens` does.

With groups (see `groups.py`) all of this holds within each group; the best of all groups are returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from chatcache.decode.actions import Advance, Done, DrawSpec, Dropped, Grown, Output, undroppable
from chatcache.decode.constraint import Constraint
from chatcache.decode.groups import Beam, Drawn, Group, num_drawn
from chatcache.decode.hypotheses import Hypothesis
from chatcache.decode.lineage import Lineage
from chatcache.decode.stop import StopRules
from chatcache.decode.streaming import NO_SCORE, Stream, TokenTree
from chatcache.types.events import FINISH_LENGTH, LiveBeam
from chatcache.types.params import BeamSearchParams


class BeamStrategy:
    """Beam search. The `n` best hypotheses are returned, best first, with their score.

    What they are sure to have in common is emitted as soon as it is, for each of them; the rest at the end. A token's
    logprob is of the model's own log-softmax. Where fewer different outputs are possible than asked for, the missing
    ones end at what was emitted, with a score of -1e9.
    """

    def __init__(
        self, params: BeamSearchParams, rules: StopRules, *, vocab_size: int, constraint: Constraint | None = None
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._num_returned = params.n if params.n is not None else params.beam_width
        # Temperature 0: a draw of width 1 (one beam, nothing terminal) is the most likely token, not a sample.
        width = min(num_drawn(params, rules, constraint), vocab_size)
        self._spec = DrawSpec(width=width, temperature=0.0, num_top=params.logprobs or 0)
        self._tree = TokenTree()
        self._stream = Stream(self._tree, self._num_returned, with_logprobs=params.logprobs is not None)
        self._lineage = Lineage(self._tree.root)
        self._groups = [Group(params, rules, self._tree, constraint) for _ in range(params.num_beam_groups)]
        self._returnable: list[Hypothesis] = []  # these, or better ones, will be returned
        self._num_streamed = 0

    @property
    def max_branches(self) -> int:
        return self._params.beam_width

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def steady(self) -> bool:
        return self._constraint is None

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        if self._constraint is None:
            return (self._spec,)
        beam = next(beam for group in self._groups for beam in group.beams if beam.node.branch == branch)
        return (replace(self._spec, mask=self._constraint.mask(beam.guide, beam.trail.num_tokens)),)

    def drop(self, index: int) -> Dropped | None:
        raise undroppable("beams")

    def advance(self, drawn: Drawn) -> Advance:
        crowd: Counter[int] = Counter()
        ended: list[Hypothesis] = []
        for group in self._groups:
            if group.beams:
                ended += group.advance(drawn, crowd)
        self._file(ended)
        beams = [beam for group in self._groups for beam in group.beams]
        dead_ends = [group.dead_end for group in self._groups if group.dead_end is not None]
        if dead_ends and not beams and not self._returnable:
            raise dead_ends[0]  # nothing is left, and nothing was found
        actions = self._lineage.move(list(dict.fromkeys(beam.node for beam in beams)))
        outputs = self._agreed(len(beams)) if beams else self._results()
        return Advance(actions, (*outputs, *self._watched(beams)), finished=not beams)

    def _file(self, ended: list[Hypothesis]) -> None:
        """Find the hypotheses that may be returned, now that some have ended, and let go of all others."""
        if not ended:
            return
        before = [*self._returnable, *ended]
        kept = [hypothesis for group in self._groups for hypothesis in group.hypotheses.kept]
        self._returnable = sorted(kept, key=lambda hypothesis: -hypothesis.score)[: self._num_returned]
        for hypothesis in before:
            if hypothesis not in self._returnable:
                self._tree.release(hypothesis.node)

    def _agreed(self, num_beams: int) -> Iterator[Output]:
        """Emit what all candidates that are sure to exist have in common."""
        num_kept = sum(len(group.hypotheses.kept) for group in self._groups)
        self._num_streamed = max(self._num_streamed, min(self._num_returned, num_beams + num_kept))
        node = self._tree.agree()
        for index in range(self._num_streamed):
            yield from self._stream.tell(index, node)

    def _watched(self, beams: list[Beam]) -> Iterator[Output]:
        """Report the live beams, each node once, if somebody watches."""
        if not self._params.stream_beams or not beams:
            return
        best = {beam.node: beam for beam in sorted(beams, key=lambda beam: beam.total)}  # of twins the better is last
        ranked = sorted(best.values(), key=lambda beam: -beam.total)
        nodes = [(beam.node, beam.total) for beam in ranked]
        yield Grown(tuple(LiveBeam(node.id, node.up().id, node.token, total) for node, total in nodes))

    def _results(self) -> Iterator[Output]:
        for index, hypothesis in enumerate(self._returnable):
            yield from self._stream.tell(index, hypothesis.node)
            yield Done(index, hypothesis.ended.finish_reason, hypothesis.ended.stop_reason, hypothesis.score)
        for index in range(len(self._returnable), self._num_returned):
            yield Done(index, FINISH_LENGTH, None, NO_SCORE)
