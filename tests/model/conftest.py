"""Models that are made once per session; one torch thread, since all models are tiny."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from chatcache.config import EngineConfig
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from tests.model import drive
from tests.model.families import Sample, make_sample


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Draw the same numbers whichever tests have run before, except in tests that are random in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def sample_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sample]:
    """Return the sample of a family, made at first use."""
    made: dict[str, Sample] = {}

    def get(name: str) -> Sample:
        if name not in made:
            made[name] = make_sample(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def load() -> Callable[..., Runner]:
    """Return a loader of float32 runners with small KV stores."""

    def load(folder: Any, **options: Any) -> Runner:
        settings = {"dtype": "float32", "kv_memory_bytes": 4 << 20, "attention_backend": "reference", "page_size": 8}
        is_interpreted = options.get("attention_backend") == "triton" and drive.KERNELS == drive.CPU
        with drive.no_warm_up() if is_interpreted else nullcontext():
            return load_model(EngineConfig(model=str(folder), **{**settings, **options}))

    return load
