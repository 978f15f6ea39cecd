"""Classification of device errors: out of memory, a failed step, or a lost device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chatcache.errors import DeviceLostError

OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
DEVICE_ERROR_TEXTS = ("CUDA error", "Triton Error [CUDA]", "cuDNN error")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device had too little memory, so that a smaller step may succeed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _is_of_device(error) and any(words in str(error) for words in OUT_OF_MEMORY_TEXTS)


def device_lost_error(error: BaseException, name: str, step: int, probe: Callable[[], None]) -> DeviceLostError | None:
    """Return the DeviceLostError to raise if the device no longer works, None if it does.

    A sticky CUDA error corrupts the context, so every later call fails, and so does `probe`. A launch that was rejected
    for bad arguments leaves the context intact. `name`: the device's name; `step`: the step that got the error.
    """
    if not _is_of_device(error) or is_out_of_memory(error):
        return None
    try:
        probe()
    except RuntimeError:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return DeviceLostError(f"{name} answers no more; step {step} met: {reason}")
    return None


def _is_of_device(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in DEVICE_ERROR_TEXTS)
