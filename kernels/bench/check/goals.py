"""The table at the end: figures that have a goal, and those made of two stages' figures."""

from __future__ import annotations

from collections.abc import Iterable

from bench.check.figures import Figure, from_json
from bench.check.stages import Outcome

PEER = "transformers continuous batching"
PEER_GOAL = ">= 3.00"


def all_figures(outcomes: Iterable[Outcome]) -> list[Figure]:
    """Return every figure of the run."""
    return [from_json(fields) for outcome in outcomes for fields in outcome.figures]


def across_stages(figures: Iterable[Figure]) -> list[Figure]:
    """Compare what different stages measured: our tokens per second over the peer's, on the same slice."""
    by_name = {figure.name: figure for figure in figures}
    found = []
    for name, peer in by_name.items():
        model, _, rest = name.partition(": ")
        ours = by_name.get(f"{model}: {rest.removeprefix(f'{PEER}, ')}")
        if rest.startswith(PEER) and ours is not None:
            label = f"{model}: over {PEER}, same slice"
            found.append(Figure(label, ours.value, "tokens/s", peer.value, ours.value / peer.value, PEER_GOAL))
    return found


def in_table(figures: Iterable[Figure]) -> list[Figure]:
    """Return the figures that have a goal, the missed ones last, next to the eye; without any, those with a limit."""
    known = list(figures)
    judged = [figure for figure in known if figure.met is not None]
    return sorted(judged, key=lambda figure: figure.met is False) or [one for one in known if one.ratio is not None]
