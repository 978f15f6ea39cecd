"""Arrays that share one buffer keep their types and do not overlap."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chatcache.model.streams import ALIGNMENT, Layout, to_device, upload

SEED = int(os.environ["CHATCACHE_TEST_SEED"])


@pytest.mark.parametrize("lengths", [(1, 5, 40), (0, 3, 0), (0, 0, 0)])
def test_layout_stores_arrays_apart_and_aligned(lengths: tuple[int, int, int]) -> None:
    noise = np.random.default_rng(SEED)
    a, b, c = lengths
    arrays: dict[str, NDArray[Any]] = {
        "a": noise.integers(-9, 9, (a, 3)).astype(np.int32),
        "b": noise.integers(-9, 9, b),
        "c": noise.random(c, np.float32),
        "d": noise.integers(0, 255, 7).astype(np.uint8),
    }
    layout = Layout({name: (array.dtype, array.shape) for name, array in arrays.items()})
    buffer = torch.full((layout.num_bytes + 64,), 0xAB, dtype=torch.uint8)
    assert layout.num_bytes % ALIGNMENT == 0 and layout.num_bytes > 0
    for name, cells in layout.arrays(buffer.numpy()).items():
        cells[...] = arrays[name]
    for name, tensor in layout.tensors(buffer).items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert tensor.numpy().dtype == arrays[name].dtype
        assert not len(tensor) or (tensor.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
    assert (buffer[layout.num_bytes :] == 0xAB).all()


def test_upload_to_a_cpu_copies_nothing() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    moved = upload([array, array.T], torch.device("cpu"))
    assert np.array_equal(moved[1], array.T) and moved[1].is_contiguous()
