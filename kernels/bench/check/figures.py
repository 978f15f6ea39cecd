"""One figure beside its limit and its goal, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `limit` is what it is judged by, in the same unit; `ratio` says how they compare.

    `goal` is a bound on the ratio, ">= 0.90" or "<= 1.03". `spread`: (lowest, highest) value of the repetitions.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    goal: str = ""
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if not self.goal or self.ratio is None:
            return None
        sign, bound = self.goal.split()
        return self.ratio >= float(bound) if sign == ">=" else self.ratio <= float(bound)

    def line(self) -> str:
        """Return the table's row."""
        limit = f"{self.limit:11.4g}" if self.limit is not None else f"{'':11}"
        ratio = f"{self.ratio:8.3f}" if self.ratio is not None else f"{'':8}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"{self.name:74.74} {self.value:11.4g} {self.unit:9} {limit} {ratio}  {self.goal:8} {verdict}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """Return the figure as plain data."""
        return {**asdict(self), "met": self.met}


HEADER = f"{'':74} {'value':>11} {'unit':9} {'limit':>11} {'ratio':>8}  goal"


def rate(name: str, value: float, unit: str, limit: float, goal: str = "") -> Figure:
    """A speed over what the device could do: ratio = value / limit."""
    return Figure(name, value, unit, limit, value / limit, goal)


def above_floor(name: str, seconds: float, floor_s: float, goal: str = "", scale: float = 1e3) -> Figure:
    """A time beside the shortest possible: ratio = floor / time, 1 at best. `scale`: 1e3 for ms, 1e6 for us."""
    unit = {1.0: "s", 1e3: "ms", 1e6: "us"}[scale]
    return Figure(name, seconds * scale, unit, floor_s * scale, floor_s / seconds, goal)


def compared(name: str, value: float, unit: str, other: float, goal: str = "") -> Figure:
    """A value beside another of the same run: ratio = value / other."""
    return Figure(name, value, unit, other, value / other, goal)


def table(figures: Iterable[Figure]) -> str:
    """Return the table's rows under their header."""
    return "\n".join((HEADER, *(figure.line() for figure in figures)))


def from_json(fields: dict[str, Any]) -> Figure:
    """Read what `as_json` wrote."""
    known = {name: fields[name] for name in Figure.__slots__}
    return Figure(**{**known, "spread": tuple(known["spread"]) if known["spread"] else None})
