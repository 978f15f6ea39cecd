"""Move a step's small arrays from the host to the device: pinned and without waiting, several of them as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

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
