"""Queues of device work: what is submitted to one runs in order, beside the others, unless it waits for a mark.

    main   the steps: table updates, copies, the network, draws
    side   pages on their way to and from host memory

Everything that touches the device goes through `submit`, so that tests can put queues in its place that run as late, or
as early, as the declared waits allow (`tests/model/lazy_streams.py`) and a wait that is missing shows without a GPU.

Move a step's small arrays from the host to the device: pinned and without waiting, several of them as one.

Results on their way from a device to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

Work = Callable[[], None]


class StreamEvent(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Hold the calling thread until all that was submitted before the mark is done. Raises: what torch raises."""
        ...


class Stream(Protocol):
    """A queue of device work, driven by one thread."""

    def submit(self, work: Work) -> None:
        """Enqueue what `work` does on the device."""
        ...

    def record_event(self) -> StreamEvent:
        """Mark the end of what has been submitted."""
        ...

    def wait_event(self, mark: StreamEvent) -> None:
        """Let whatever is submitted from now on wait for the mark, without holding the calling thread."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """Where steps and swaps run."""

    main: Stream
    side: Stream


class ImmediateStream:
    """The stream of a CPU: work is done when `submit` returns. It is its own mark."""

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

    def record_event(self) -> CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream or torch.cuda.current_stream(self._device))
        return CudaEvent(event)

    def wait_event(self, mark: StreamEvent) -> None:
        if not isinstance(mark, CudaEvent):
            raise TypeError(f"a CUDA stream cannot wait for a {type(mark).__name__}")
        (self._stream or torch.cuda.current_stream(self._device)).wait_event(mark.event)


def make_streams(device: torch.device) -> Streams:
    """Return the streams that a runner on `device` uses."""
    if device.type != "cuda":
        return Streams(ImmediateStream(), ImmediateStream())
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Streams(CudaStream(device), CudaStream(device, side))


Bytes = NDArray[np.uint8]

ALIGNMENT = 128
TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return `array` as a tensor of the same type on `device`; on CPUs it may share the array's memory.

    The host never waits: a copy out of ordinary memory would first let the device finish all it has been given.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or not array.size:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned copy until the device has read it


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`, moved there together; on CPUs they may share the arrays' memory."""
    if device.type != "cuda":
        return [to_device(array, device) for array in arrays]
    layout = Layout({str(place): (array.dtype, array.shape) for place, array in enumerate(arrays)})
    pinned = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
    for cells, array in zip(layout.arrays(pinned.numpy()).values(), arrays, strict=True):
        cells[...] = array
    return list(layout.tensors(pinned.to(device, non_blocking=True)).values())


class Layout:
    """Where several arrays lie in one buffer, each at a multiple of 128 bytes.

    | tokens ... | positions ... | slots ... | items ......... |
    0            128             256         384               num_bytes
    """

    def __init__(self, parts: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]) -> None:
        self._parts: dict[str, tuple[int, int, np.dtype[Any], tuple[int, ...]]] = {}
        end = 0
        for name, (kind, shape) in parts.items():
            dtype = np.dtype(kind)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._parts[name] = (end, size, dtype, shape)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = max(end, ALIGNMENT)

    def arrays(self, buffer: Bytes) -> dict[str, NDArray[Any]]:
        """Return the parts of a host buffer, [num_bytes] or more."""
        return {
            name: buffer[first : first + size].view(dtype).reshape(shape)
            for name, (first, size, dtype, shape) in self._parts.items()
        }

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the parts of a tensor of bytes, [num_bytes] or more."""
        return {
            name: buffer[first : first + size].view(TORCH_DTYPES[dtype]).view(shape)
            for name, (first, size, dtype, shape) in self._parts.items()
        }


class Download:
    """Results that lie in one buffer and move in one copy."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._source = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        self._host = self._source
        self._done: torch.cuda.Event | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return where the results are to be written."""
        return self._layout.tensors(self._source)

    def start(self) -> None:
        """Enqueue the copy, behind what writes the results."""
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
