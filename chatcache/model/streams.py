"""Streams of device work, and transfers between host and device.

Work submitted to one stream runs in order, and concurrently with other streams unless it waits for an event:

    main   the steps: table updates, page copies, the network, sampling
    side   pages on their way to and from host memory

All device work goes through `submit`, so that tests can substitute streams that run work as late or as early as the
declared waits allow (`tests/model/lazy_streams.py`) and detect a missing wait without a GPU.

Small arrays move to the device through pinned memory, several in one copy, and the host does not wait; `Download` moves
results back the same way, and `Uploader` moves weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

Work = Callable[[], None]

Bytes = NDArray[np.uint8]
ALIGNMENT = 128
TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


class StreamEvent(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling thread until all work before the event is done. Raises: as torch."""
        ...


class Stream(Protocol):
    """A queue of device work, used from one thread."""

    def submit(self, work: Work) -> None:
        """Enqueue the device work that `work` launches."""
        ...

    def record_event(self) -> StreamEvent:
        """Return an event at the end of the work submitted so far."""
        ...

    def wait_event(self, mark: StreamEvent) -> None:
        """Make work submitted from now on wait for the event; the calling thread does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a runner: `main` for steps, `side` for swaps."""

    main: Stream
    side: Stream


class ImmediateStream:
    """The stream of a CPU: work is done when `submit` returns. It is its own event."""

    def submit(self, work: Work) -> None:
        work()

    def record_event(self) -> ImmediateStream:
        return self

    def wait_event(self, mark: StreamEvent) -> None:
        pass

    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """A recorded CUDA event."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A CUDA stream; `stream` None means the stream that is current at submission."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def submit(self, work: Work) -> None:
        if self._stream is None:
            work()
        else:
            with torch.cuda.stream(self._stream):
                work()

    def record_event(self) -> CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream or torch.cuda.current_stream(self._device))
        return CudaEvent(event)

    def wait_event(self, mark: StreamEvent) -> None:
        if not isinstance(mark, CudaEvent):
            raise TypeError(f"a CUDA stream cannot wait for a {type(mark).__name__}")
        (self._stream or torch.cuda.current_stream(self._device)).wait_event(mark.event)


def make_streams(device: torch.device) -> Streams:
    """Return the streams for a runner on `device`."""
    if device.type != "cuda":
        return Streams(ImmediateStream(), ImmediateStream())
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Streams(CudaStream(device), CudaStream(device, side))


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy `array` to a tensor of the same type on `device` without waiting for the device.

    For CUDA it is copied to pinned memory first: a copy from unpinned memory waits for all earlier work of the device.
    On CPUs the tensor may share the memory of the array.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    if device.type != "cuda" or not array.size:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned copy until the device has read it


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`, moved in one copy.

    On CPUs the tensors may share the arrays' memory.
    """
    if device.type != "cuda" or len(arrays) == 1:
        return [to_device(array, device) for array in arrays]
    layout = Layout({str(place): (array.dtype, array.shape) for place, array in enumerate(arrays)})
    pinned = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
    for cells, array in zip(layout.arrays(pinned.numpy()).values(), arrays, strict=True):
        cells[...] = array
    return list(layout.tensors(pinned.to(device, non_blocking=True)).values())


UPLOAD_BYTES = 32 << 20


class Uploader:
    """Copies large tensors, such as weights in mapped files, to a device through two pinned buffers in turn.

    The host fills one buffer while the device reads the other. A copy from unpinned memory does both in turn, in
    small pieces.

        host     | fill 0 | fill 1 | wait, fill 0 | wait, fill 1 |
        device            | read 0 | read 1       | read 0       | read 1 |
    """

    def __init__(self, stream: Stream, *, pinned: bool, num_bytes: int = UPLOAD_BYTES) -> None:
        self._stream = stream
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._reads: list[StreamEvent | None] = [None, None]
        self._next = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue the copy of a host tensor into `target`, which is contiguous, in the target's dtype.

        The source may change when this returns.
        """
        to, given = target.view(-1), source.reshape(-1)
        size = len(self._buffers[0]) // target.element_size()
        for part, values in zip(torch.split(to, size), torch.split(given, size), strict=True):
            number, self._next = self._next, 1 - self._next
            if (read := self._reads[number]) is not None:
                read.wait()
            filled = self._buffers[number][: part.nbytes].view(target.dtype)
            filled.copy_(values)
            self._stream.submit(partial(_copy, part, filled))
            self._reads[number] = self._stream.record_event()


def _copy(target: Tensor, pinned: Tensor) -> None:
    target.copy_(pinned, non_blocking=True)


ArraySpecs = dict[str, tuple[DTypeLike, tuple[int, ...]]]
"""The dtype and the shape of several arrays, by name."""


class Layout:
    """Offsets of several arrays in one buffer, each a multiple of 128 bytes.

    | tokens ... | positions ... | slots ... | items ......... |
    0            128             256         384               num_bytes
    """

    def __init__(self, parts: ArraySpecs) -> None:
        self._parts: dict[str, tuple[int, int, np.dtype[Any], tuple[int, ...]]] = {}
        end = 0
        for name, (kind, shape) in parts.items():
            dtype = np.dtype(kind)
            size = dtype.itemsize * math.prod(shape)
            self._parts[name] = (end, size, dtype, shape)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = max(end, ALIGNMENT)

    def arrays(self, buffer: Bytes) -> dict[str, NDArray[Any]]:
        """Return the arrays in a host buffer of `num_bytes` or more, by name."""
        return {
            name: buffer[first : first + size].view(dtype).reshape(shape)
            for name, (first, size, dtype, shape) in self._parts.items()
        }

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a byte tensor of `num_bytes` or more, by name."""
        return {
            name: buffer[first : first + size].view(TORCH_DTYPES[dtype]).view(shape)
            for name, (first, size, dtype, shape) in self._parts.items()
        }


class Download:
    """Results in one device buffer that move to the host in one copy."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._source = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        self._host = self._source
        self._done: torch.cuda.Event | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the device tensors to write the results to."""
        return self._layout.tensors(self._source)

    def start(self) -> None:
        """Enqueue the copy after the work that writes the results."""
        if self._source.device.type != "cuda":
            return
        self._host = torch.empty(self._layout.num_bytes, dtype=torch.uint8, pin_memory=True)
        self._host.copy_(self._source, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> dict[str, NDArray[Any]]:
        """Wait for the copy and return the results."""
        if self._done is not None:
            self._done.synchronize()
        return self._layout.arrays(self._host.numpy())
