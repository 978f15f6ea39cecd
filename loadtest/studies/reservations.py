"""The memory management that pages are compared with: contiguous reservations and static batches.

Orca as the vLLM paper built it (section 6.1): a buddy allocator hands out contiguous chunks, and each sequence of a
request reserves one chunk for its prompt and its estimated output. FasterTransformer: batches of a fixed size, in which
no request starts before all have ended. Both satisfy `chatcache.scheduler.scheduler.Reservation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Reservation

MAX_MODEL_LEN = 2048
UNIT = 16  # tokens; the smallest chunk


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


class BuddyAllocator:
    """Allocates chunks of a power of two of units, at most `max_chunk`, out of `num_units`.

    Source: Knowlton, "A Fast Storage Allocator", CACM 1965. Invariant: two free buddies are always merged.
    """

    def __init__(self, num_units: int, max_chunk: int) -> None:
        self.max_chunk = max_chunk
        self._free: dict[int, set[int]] = {}  # size -> first units
        self._sizes: dict[int, int] = {}  # first unit -> size of the allocated chunk
        first, size = 0, max_chunk
        while size:
            self._free[size] = set()
            while first + size <= num_units:
                self._free[size].add(first)
                first += size
            size //= 2

    @property
    def num_free(self) -> int:
        return sum(size * len(chunks) for size, chunks in self._free.items())

    def allocate(self, num_units: int) -> int | None:
        """Return the first unit of a chunk of at least `num_units`, or None if no such chunk is free."""
        wanted = size = next_power_of_two(num_units)
        while size <= self.max_chunk and not self._free[size]:
            size *= 2
        if size > self.max_chunk:
            return None
        first = min(self._free[size])
        self._free[size].remove(first)
        while size > wanted:
            size //= 2
            self._free[size].add(first + size)
        self._sizes[first] = wanted
        return first

    def free(self, first: int) -> None:
        """Free a chunk and merge it with its buddy as long as that is free."""
        size = self._sizes.pop(first)
        while size < self.max_chunk and (first ^ size) in self._free[size]:
            self._free[size].remove(first ^ size)
            first = min(first, first ^ size)
            size *= 2
        self._free[size].add(first)


Estimate = Callable[[int, int, int], int]
"""(prompt tokens, true output tokens, longest context) -> slots to reserve for one sequence."""

ESTIMATES: Mapping[str, Estimate] = {
    "max": lambda prompt, output, longest: longest,
    "pow2": lambda prompt, output, longest: min(prompt + next_power_of_two(output), longest),
    "oracle": lambda prompt, output, longest: prompt + output,
}


class ContiguousReservation:
    """Reserves one contiguous chunk per sequence of a request.

    `output_tokens`: the output length of each request by id, which the oracle knows. `estimate`: a key of ESTIMATES.
    `max_len`: tokens of the longest context, and of the largest chunk.
    """

    def __init__(
        self, num_slots: int, estimate: str, output_tokens: Mapping[str, int], max_len: int = MAX_MODEL_LEN
    ) -> None:
        self.buddy = BuddyAllocator(num_slots // UNIT, max_len // UNIT)
        self._max_len = max_len
        self._estimate = ESTIMATES[estimate]
        self._output_tokens = output_tokens
        self._chunks: dict[LiveRequest, list[int]] = {}

    def num_slots(self, request: LiveRequest) -> int:
        """Return how many slots each sequence of the request reserves, without the rounding of the allocator."""
        return self._estimate(request.num_prompt_tokens, self._output_tokens[request.request_id], self._max_len)

    def reserve(self, request: LiveRequest) -> bool:
        chunks: list[int] = []
        for _ in range(request.max_branches):
            first = self.buddy.allocate(-(-self.num_slots(request) // UNIT))
            if first is None:
                for chunk in chunks:
                    self.buddy.free(chunk)
                return False
            chunks.append(first)
        self._chunks[request] = chunks
        return True

    def release(self, request: LiveRequest) -> None:
        for chunk in self._chunks.pop(request):
            self.buddy.free(chunk)


class StaticBatch:
    """Starts at most `size` requests at one moment, and no other before all of them have ended.

    `clock`: a batch is open as long as it does not advance. `inner`: memory that requests of the batch reserve,
    released when the batch ends; None for pages.
    """

    def __init__(self, size: int, clock: Callable[[], float], inner: Reservation | None = None) -> None:
        self._size = size
        self._clock = clock
        self._inner = inner
        self._running: set[LiveRequest] = set()
        self._ended: list[LiveRequest] = []
        self._opened_s = 0.0

    @property
    def num_requests(self) -> int:
        """The size of the present batch, with requests that have ended: their rows are computed to the end."""
        return len(self._running) + len(self._ended)

    @property
    def is_done(self) -> bool:
        return not self._running

    def reserve(self, request: LiveRequest) -> bool:
        if not self._running:
            self._opened_s = self._clock()
        if self._clock() > self._opened_s or self.num_requests == self._size:
            return False
        if self._inner is not None and not self._inner.reserve(request):
            return False
        self._running.add(request)
        return True

    def release(self, request: LiveRequest) -> None:
        self._running.remove(request)
        self._ended.append(request)
        if self._running:
            return
        for ended in self._ended if self._inner is not None else ():
            self._inner.release(ended)  # type: ignore[union-attr]
        self._ended.clear()
