"""How long steps take on this machine, as measured: per prompt token, and per branch that decodes."""

from __future__ import annotations

from collections import deque
from statistics import median

NUM_REMEMBERED_STEPS = 64
MIN_ROW_RATIO = 1.5


class PrefillSpeed:
    """Seconds per prompt token, measured over the recent steps that mostly computed prompts.

    Decode steps are left out: they read all weights for a few tokens, so their time per token says nothing about
    prompts. The median, weighted by tokens, ignores single steps that compiled a kernel or were delayed.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED_STEPS)  # (seconds per token, tokens)

    def record(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Record an executed step that computed `num_tokens` tokens in `num_rows` rows."""
        if num_tokens >= 2 * num_rows:
            self._steps.append((seconds / num_tokens, num_tokens))

    def seconds_per_token(self) -> float | None:
        """Return the weighted median, or None before any prompt was computed."""
        half = sum(num_tokens for _, num_tokens in self._steps) / 2
        for seconds, num_tokens in sorted(self._steps):
            half -= num_tokens
            if half <= 0:
                return seconds
        return None


class DecodeSpeed:
    """Seconds of a decode step, measured over recent steps in which every row computed one token.

    Steps with a similar number of rows (up to twice as many) are kept together, so that the slope survives a long time
    with the same number of branches.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, int]]] = {}  # (seconds, rows) by the bit length of the rows
        self._latest = 0

    def record(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Record an executed step that computed `num_tokens` tokens in `num_rows` rows."""
        if num_tokens == num_rows > 0:
            self._latest = num_rows.bit_length()
            steps = self._steps.pop(self._latest, None)
            if steps is None:
                steps = deque(maxlen=NUM_REMEMBERED_STEPS // 4)
            self._steps[self._latest] = steps  # the dict is in the order of last use
            steps.append((seconds, num_rows))

    def seconds_per_step(self) -> float | None:
        """Return the median of steps with about as many rows as the latest; None before the first."""
        return median(seconds for seconds, _ in self._steps[self._latest]) if self._steps else None

    def seconds_per_branch(self) -> float | None:
        """Return by how much one more row lengthens a step; None while all steps had about as many rows."""
        fit = self.linear_fit()
        return None if fit is None else fit[1]

    def linear_fit(self) -> tuple[float, float] | None:
        """Return the seconds of a step without rows, by extrapolation, and those that each row adds.

        The line through the latest steps and those before them that had MIN_ROW_RATIO times as many rows or as few.
        Steps of long ago may have run on a machine that was less busy. A line that would be below 0 without rows begins
        there instead. None while all steps had about as many rows.
        """
        points = [
            (median(seconds for seconds, _ in steps), median(rows for _, rows in steps))
            for steps in reversed(self._steps.values())
        ]
        if len(points) < 2:
            return None
        latest, *others = points

        def row_ratio(point: tuple[float, float]) -> float:
            return max(point[1], latest[1]) / min(point[1], latest[1])

        other = next((each for each in others if row_ratio(each) >= MIN_ROW_RATIO), max(others, key=row_ratio))
        (few_s, few), (many_s, many) = sorted((latest, other), key=lambda point: point[1])
        per_row_s = max(0.0, (many_s - few_s) / (many - few))
        if few * per_row_s > few_s:
            return 0.0, many_s / many
        return few_s - few * per_row_s, per_row_s
