"""KV pages are prefaulted ahead of use, and prefaulting has no other effect."""

from __future__ import annotations

import math
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chatcache_kernels.types import KVPages

from chatcache.bench.drivers import SHAPES, EngineDriver, write_model
from chatcache.config import EngineConfig
from chatcache.factory import build_engine
from chatcache.model.host_memory import PagePrefaulter
from chatcache.model.loading import loader
from chatcache.types.request import SamplingParams

LAYERS, HEADS, DIM, SIZE = 3, 2, 64, 16
PAGE_BYTES = 2 * LAYERS * HEADS * DIM * SIZE * 2  # of keys and values in all layers, bf16

pytestmark = pytest.mark.requires_populate


def resident(pages: KVPages, page: int) -> bool:
    """Whether every byte of a page has memory behind it, by the system's own account."""
    with open("/proc/self/pagemap", "rb") as file:
        for store in (pages.k, pages.v):
            for layer in store:
                start = layer[page].data_ptr()
                for number in range(start // mmap.PAGESIZE, (start + layer[page].nbytes - 1) // mmap.PAGESIZE + 1):
                    file.seek(8 * number)
                    if not int.from_bytes(file.read(8), "little") >> 63:
                        return False
    return True


def settle(touch: PagePrefaulter) -> None:
    while (thread := touch.thread) is not None:
        thread.join()


@pytest.fixture
def pages() -> KVPages:
    """Return pages in mappings of their own.

    After a test that loads a model, the C library may reuse memory of any size.
    """
    k_shape, v_shape = (LAYERS, 20_000, HEADS, DIM, SIZE), (LAYERS, 20_000, HEADS, SIZE, DIM)
    k, v = (
        torch.frombuffer(mmap.mmap(-1, 2 * math.prod(shape)), dtype=torch.bfloat16).view(shape)
        for shape in (k_shape, v_shape)
    )
    return KVPages(k, v, SIZE, HEADS, DIM)


@pytest.mark.slow
def test_prefaulter_maps_pages_ahead_of_use(pages: KVPages) -> None:
    touch = PagePrefaulter((pages,), ahead_bytes=1000 * PAGE_BYTES)
    assert not resident(pages, 500)
    touch.ensure(0)
    settle(touch)
    assert not touch.is_closed
    assert all(resident(pages, page) for page in (0, 1, 500, 999, 1000))
    assert not resident(pages, 19_000)
    touch.ensure(18_500)
    settle(touch)
    assert resident(pages, 19_000) and resident(pages, 19_499)
    touch.ensure(19_999)
    settle(touch)
    assert resident(pages, 19_999)


def test_prefaulting_keeps_the_contents_of_pages(pages: KVPages) -> None:
    pages.k[:, 3] = 1.5
    pages.v[:, 7] = -2.0
    touch = PagePrefaulter((pages,), ahead_bytes=100 * PAGE_BYTES)
    touch.ensure(0)
    settle(touch)
    assert (pages.k[:, 3] == 1.5).all() and (pages.v[:, 7] == -2.0).all()


def test_no_page_is_prefaulted_while_a_step_runs(pages: KVPages) -> None:
    touch = PagePrefaulter((pages,), ahead_bytes=1000 * PAGE_BYTES)
    touch.pause()
    touch.ensure(0)
    thread = touch.thread
    assert thread is not None
    thread.join(0.5)
    assert thread.is_alive() and not resident(pages, 900)
    touch.resume()
    settle(touch)
    assert resident(pages, 900)


def test_close_ends_a_paused_thread(pages: KVPages) -> None:
    touch = PagePrefaulter((pages,), ahead_bytes=1000 * PAGE_BYTES)
    touch.pause()
    touch.ensure(0)
    touch.close()
    assert touch.thread is None and not resident(pages, 900)


def test_every_step_pauses_the_prefaulter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recorder(PagePrefaulter):
        def pause(self) -> None:
            calls.append("pause")

        def resume(self) -> None:
            calls.append("resume")

    monkeypatch.setattr(loader, "PagePrefaulter", Recorder)
    write_model(SHAPES["tiny"], tmp_path)
    engine = build_engine(EngineConfig(model=str(tmp_path), kv_memory_bytes=2**22), need_tokenizer=False)
    driver = EngineDriver(engine)
    calls.clear()
    driver.run([driver.prompt(8)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert calls == ["pause", "resume"] * 4


def test_closed_prefaulter_maps_nothing(pages: KVPages) -> None:
    touch = PagePrefaulter((pages,), ahead_bytes=1000 * PAGE_BYTES)
    touch.close()
    touch.ensure(0)
    settle(touch)
    assert not resident(pages, 900)


def test_close_waits_for_the_thread(pages: KVPages) -> None:
    touch = PagePrefaulter((pages,), ahead_bytes=15_000 * PAGE_BYTES)
    touch.ensure(0)
    thread = touch.thread
    touch.close()
    assert thread is None or not thread.is_alive()
    assert touch.is_closed and touch.thread is None
    touch.ensure(19_000)
    assert touch.thread is None


@pytest.mark.slow
def test_program_that_does_not_close_exits_cleanly() -> None:
    """The interpreter waits for the thread, wherever it is."""
    program = f"""
import torch
from chatcache_kernels import cpu
from chatcache.model.host_memory import PagePrefaulter
pages = cpu.allocate_pages(30, 20_000, {SIZE}, {HEADS}, {DIM}, torch.bfloat16)
touch = PagePrefaulter((pages,))
touch.ensure(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
