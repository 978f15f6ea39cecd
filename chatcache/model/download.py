"""Results on their way from a device to the host."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.transfer import Layout


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
