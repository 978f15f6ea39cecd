"""Move a step's small arrays from the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return `array` as a tensor of the same type on `device`; on CPUs it may share the array's memory."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
