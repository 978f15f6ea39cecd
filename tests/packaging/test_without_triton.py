"""Test that everything that runs on CPUs works where the package `triton` is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HIDDEN = Path(__file__).parent / "no_triton"
TRITON_MODULES = {"chatcache.model.sampling.device_sampler"}  # imported for the attention backend "triton" only


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HIDDEN), *filter(None, sys.path)])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_hiding_triton_works() -> None:
    assert run("import importlib.util; print(importlib.util.find_spec('triton'))") == "None"
    assert run("try: import triton.language\nexcept ImportError: print('hidden')") == "hidden"


def test_all_modules_except_those_of_triton_are_importable() -> None:
    code = """
import importlib, pkgutil
import chatcache, chatcache_kernels
failed = []
for package in (chatcache, chatcache_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.partition(".")[0] == "triton", error
            failed.append(module.name)
print(*failed)
"""
    failed = {name for name in run(code).split() if not name.startswith("chatcache_kernels.triton")}
    assert failed == TRITON_MODULES


def test_llm_generates_without_triton() -> None:
    code = """
from chatcache import LLM, SamplingParams
with LLM(kv_memory="64MiB") as llm:
    (output,) = llm.generate("Hello", SamplingParams(n=3, max_tokens=4, ignore_eos=True), use_tqdm=False)
print(llm.config.attention_backend, len(output.outputs), {len(each.token_ids) for each in output.outputs})
"""
    assert run(code) == "auto 3 {4}"


def test_attention_backend_triton_is_refused_with_its_reason() -> None:
    code = """
from chatcache import LLM
from chatcache.errors import ChatcacheError
try:
    LLM(attention_backend="triton")
except ChatcacheError as error:
    print(error)
"""
    assert "needs the package triton, which is not installed" in run(code)
