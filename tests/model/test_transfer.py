"""Arrays that share one buffer keep their types and do not overlap."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chatcache.model.streams import ALIGNMENT, Layout, Uploader, make_streams, to_device, upload
from tests.model.drive import KERNELS
from tests.model.lazy_streams import LazyEvent, LazyStream

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


def upload_weights(stream: LazyStream) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what an uploader of buffers of 64 bytes copied, and what it should have."""
    uploader, noise = Uploader(stream, pinned=False, num_bytes=64), torch.Generator().manual_seed(SEED)
    sources = [torch.randn(shape, generator=noise) for shape in ((40,), (5, 9), (0, 3), (), (1,))]
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float32, torch.bfloat16]
    expected = [source.to(kind, copy=True) for source, kind in zip(sources, kinds, strict=True)]
    targets = [torch.full(one.shape, -7.0, dtype=one.dtype) for one in expected]
    for target, source in zip(targets, sources, strict=True):
        uploader.copy(target, source)
        source.fill_(torch.nan)
    stream.run_to(len(stream.entries))
    return targets, expected


@pytest.mark.parametrize("eager", [False, True])
def test_uploader_refills_a_buffer_after_the_device_has_read_it(eager: bool) -> None:
    for target, expected in zip(*upload_weights(LazyStream(eager)), strict=True):
        assert torch.equal(target, expected)


def test_injected_missing_wait_of_an_uploader_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyEvent, "wait", lambda self: None)
    targets, expected = upload_weights(LazyStream(eager=False))
    assert not all(map(torch.equal, targets, expected))


def test_weights_reach_the_device_of_triton_kernels() -> None:
    """`gpu-check --dry-run` selects this, and its emulated device refuses operations on tensors of two devices."""
    source = torch.randn(300, 7).to(torch.bfloat16)
    target = torch.empty(300, 7, device=KERNELS)
    uploader = Uploader(make_streams(KERNELS).main, pinned=KERNELS.type == "cuda", num_bytes=1024)
    uploader.copy(target, source)
    assert target.device.type == KERNELS.type and torch.equal(target.cpu(), source.float())
