"""What the attention kernel's machine code does on Hopper: how it copies keys, and what multiplies them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
BF16 = "attention.paged_attention_kernel *bf16/*fp32/*i32 sinks=None"
LLAMA = "SLICES=1 GROUP=4 KV_HEADS=8 HEAD_DIM=128"


@pytest.mark.parametrize(("rows", "product"), [(16, "mma.sync"), (128, "wgmma.mma_async")])
def test_keys_are_copied_16_bytes_at_a_time_while_others_are_multiplied(
    rows: int, product: str, tmp_path: Path
) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(TESTS.parent), variables.get("PYTHONPATH", ""))
    variables |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(TESTS / "compile_kernels.py"), "--arch", "90", "--asm", str(tmp_path)]
    command += ["--module", "chatcache_kernels.triton.attention", "--match", f"{BF16} ROWS={rows} {LLAMA}"]
    text = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=True).stdout
    (line,) = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert line["error"] is None
    (code,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*", code)
    assert len(copies) >= 16
    assert all(" 0x10" in copy for copy in copies), "narrower copies"
    waits = {int(number, 0) for number in re.findall(r"cp\.async\.wait_group\s+(\w+)", code)}
    assert max(waits) >= 2, "no tile of keys and values is on its way while one is waited for"
    assert product in code
    assert not re.search(r"ld\.global[.\w:]*\.[bu]16\b", code), "narrow loads"
