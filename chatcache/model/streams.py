"""Queues of device work: what is submitted to one runs in order, beside the others, unless it waits for a mark.

    main   the steps: table updates, copies, the network, draws
    side   pages on their way to and from host memory

Everything that touches the device goes through `submit`, so that tests can put queues in its place that run as late, or
as early, as the declared waits allow (`tests/model/lazy_streams.py`) and a wait that is missing shows without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Hold the calling thread until all that was submitted before the mark is done. Raises: what torch raises."""
        ...


class Stream(Protocol):
    """A queue of device work, driven by one thread."""

    def submit(self, work: Work) -> None:
        """Enqueue what `work` does on the device."""
        ...

    def mark(self) -> Mark:
        """Mark the end of what has been submitted."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Let whatever is submitted from now on wait for the mark, without holding the calling thread."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """Where steps and swaps run."""

    main: Stream
    side: Stream


class Immediate:
    """The stream of a CPU: work is done when `submit` returns. It is its own mark."""

    def submit(self, work: Work) -> None:
        work()

    def mark(self) -> Immediate:
        return self

    def wait_for(self, mark: Mark) -> None:
        pass

    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event that was recorded."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A CUDA stream; `stream` None is the one that is current where work is submitted."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def submit(self, work: Work) -> None:
        if self._stream is None:
            work()
        else:
            with torch.cuda.stream(self._stream):
                work()

    def mark(self) -> CudaMark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream or torch.cuda.current_stream(self._device))
        return CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        if not isinstance(mark, CudaMark):
            raise TypeError(f"a CUDA stream cannot wait for a {type(mark).__name__}")
        (self._stream or torch.cuda.current_stream(self._device)).wait_event(mark.event)


def streams_of(device: torch.device) -> Streams:
    """Return the streams that a runner on `device` uses."""
    if device.type != "cuda":
        return Streams(Immediate(), Immediate())
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Streams(CudaStream(device), CudaStream(device, side))
