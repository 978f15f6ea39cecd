"""Draw more candidates than asked for and return those the model finds most likely per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chatcache.decode.actions import Advance, Candidates, Done, DrawSpec, Dropped, Emit, Output, Strategy, undroppable
from chatcache.types.events import TokenLogprob


@dataclass(slots=True)
class _Drawn:
    """One candidate of the strategy within."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None


class BestOfStrategy:
    """Return the `n` candidates of `inner` with the best mean token log-probability, best first.

    Which they are is known when the last one ends, so nothing is emitted before. Equal means: the earlier drawn first.
    """

    def __init__(self, inner: Strategy, n: int) -> None:
        self._inner = inner
        self._num_returned = n
        self._drawn: dict[int, _Drawn] = {}

    @property
    def max_branches(self) -> int:
        return self._inner.max_branches

    @property
    def lockstep(self) -> bool:
        return self._inner.lockstep

    @property
    def steady(self) -> bool:
        return self._inner.steady

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return self._inner.draws(branch)

    def drop(self, index: int) -> Dropped | None:
        raise undroppable("candidates of best_of")

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        advance = self._inner.advance(drawn)
        for output in advance.outputs:
            self._keep(output)
        return Advance(advance.actions, self._best() if advance.finished else (), advance.finished)

    def _keep(self, output: Output) -> None:
        if isinstance(output, Emit):
            drawn = self._drawn.setdefault(output.index, _Drawn())
            drawn.tokens += output.token_ids
            drawn.logprobs += output.logprobs
        elif isinstance(output, Done):
            self._drawn.setdefault(output.index, _Drawn()).done = output

    def _best(self) -> tuple[Output, ...]:
        done = [(drawn, drawn.done) for _, drawn in sorted(self._drawn.items()) if drawn.done is not None]
        done.sort(key=lambda pair: -pair[1].score / max(len(pair[0].tokens), 1))
        outputs: list[Output] = []
        for index, (drawn, end) in enumerate(done[: self._num_returned]):
            outputs.append(Emit(index, tuple(drawn.tokens), tuple(drawn.logprobs)))
            outputs.append(Done(index, end.finish_reason, end.stop_reason, end.score))
        return tuple(outputs)
