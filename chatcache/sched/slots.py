"""Page-table rows of the runner: which are free, and which must be copied from which before the next step.

The runner copies rows in the order given, before it applies any update. A row that is freed and taken again in between
is therefore still intact when a fork listed earlier reads it.
"""

from __future__ import annotations


class Slots:
    """`num_slots` rows. `promised` counts those that running requests may come to need at once."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.promised = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._forks: list[tuple[int, int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_unpromised(self) -> int:
        return self.num_slots - self.promised

    @property
    def has_forks(self) -> bool:
        return bool(self._forks)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        if slot >= 0:
            self._free.append(slot)

    def fork(self, src: int, num_pages: int) -> int:
        """Take a slot whose row will begin with the first `num_pages` entries of row `src`."""
        slot = self.take()
        if num_pages:
            self._forks.append((src, slot, num_pages))
        return slot

    def take_forks(self) -> list[tuple[int, int, int]]:
        """Return the row copies (src slot, dst slot, num_pages) since the last call, in order."""
        forks, self._forks = self._forks, []
        return forks
