"""Which stages there are, and running each in a process of its own, so that none can take another down."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.check.context import Context
from bench.check.machine import ROOT

TOTAL_S = 540.0
GRACE_S = 3.0  # a stage should end by itself; this long after its limit it is killed
BARE = ROOT / "kernels" / "bench" / "bare"


@dataclass(frozen=True, slots=True)
class Stage:
    """`module.run(context, *arguments)`, killed after `limit_s`."""

    name: str
    module: str
    limit_s: float
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What a stage left behind, and how it ended: ok | failed | killed | left out."""

    name: str
    ended: str
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)


STAGES: dict[str, tuple[Stage, ...]] = {
    "full": (
        Stage("tests", "suite", 140),
        Stage("ceilings", "ceilings", 30),
        Stage("decode kernels", "decode", 75),
        Stage("model qwen3-0.6b", "model", 70, ("qwen3-0.6b",)),
        Stage("model llama3-8b", "model", 80, ("llama3-8b",)),
        Stage("offline qwen3-0.6b", "offline", 55, ("qwen3-0.6b",)),
        Stage("peer qwen3-0.6b", "peer", 70, ("qwen3-0.6b",)),
        Stage("prefill kernels", "prefill", 35),
        Stage("small kernels", "small", 35),
        Stage("sampling", "sampling", 20),
        Stage("offline llama3-8b", "offline", 60, ("llama3-8b",)),
    ),
    "cpu": (
        Stage("tests", "suite", 400),
        Stage("ceilings", "ceilings", 30),
        Stage("decode kernels", "decode", 60),
        Stage("prefill kernels", "prefill", 60),
        Stage("small kernels", "small", 60),
        Stage("sampling", "sampling", 60),
        Stage("model smollm2-135m", "model", 90, ("smollm2-135m",)),
    ),
    "tiny": (
        Stage("tests", "suite", 120),
        Stage("ceilings", "ceilings", 60),
        Stage("decode kernels", "decode", 60),
        Stage("prefill kernels", "prefill", 60),
        Stage("small kernels", "small", 60),
        Stage("sampling", "sampling", 60),
        Stage("model tiny", "model", 60, ("tiny",)),
        Stage("offline tiny", "offline", 60, ("tiny",)),
    ),
}
LEFT_OUT = {
    "cpu": {
        "CUDA graphs, compiled Triton kernels": "no GPU here; the tests run Triton kernels under the interpreter",
        "Qwen3-0.6B and Llama-3-8B shapes, the offline queue, transformers beside it": "made for a GPU",
    },
    "tiny": {"everything of a useful size": "--quick only shows that every stage runs"},
}


def environment() -> dict[str, str]:
    """Return a stage's environment: our packages first, the stand-in for msgspec where that is missing."""
    path = [str(ROOT), str(ROOT / "kernels")]
    if importlib.util.find_spec("msgspec") is None:
        path.append(str(BARE))
    cache = Path(tempfile.gettempdir()) / "chatcache-triton"  # one for all stages, so that each kernel compiles once
    given = {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**given, **os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def run_here(stage: Stage, device: str, size: str, out: Path, limit_s: float) -> int:
    """Run a stage in this process; return how many of its parts failed."""
    context = Context(device, size, out, sheet_of(stage, out), time.monotonic() + limit_s)
    importlib.import_module(f"bench.check.{stage.module}").run(context, *stage.arguments)
    return context.num_failures


def run_apart(stage: Stage, size: str, out: Path, limit_s: float, grace_s: float = GRACE_S) -> Outcome:
    """Run a stage in a process of its own, killed with all its children at its limit; read what it wrote."""
    sheet_of(stage, out).unlink(missing_ok=True)
    script = ROOT / "kernels" / "bench" / "gpu_check.py"
    command = [sys.executable, str(script), "--out", str(out), "--size", size, "--stage", stage.name]
    start = time.monotonic()
    process = subprocess.Popen([*command, "--seconds", f"{limit_s:.1f}"], env=environment(), start_new_session=True)
    try:
        status: int | None = process.wait(limit_s + grace_s)
    except subprocess.TimeoutExpired:
        status = None
    _end(process)
    outcome = read_sheet(stage, out)
    outcome.seconds = time.monotonic() - start
    if status is None:
        outcome.failures.append({"failure": stage.name, "reason": f"killed at its limit of {limit_s:.0f} s"})
    elif status and not outcome.failures:
        outcome.failures.append({"failure": stage.name, "reason": f"its process ended with {status}"})
    outcome.ended = "killed" if status is None else "failed" if outcome.failures else "ok"
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started; those of an earlier end are gone already."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def sheet_of(stage: Stage, out: Path) -> Path:
    """Return the file a stage writes to."""
    return out / f"{stage.name.replace(' ', '-')}.jsonl"


def read_sheet(stage: Stage, out: Path) -> Outcome:
    """Read what a stage wrote; a line cut short by a kill is left out."""
    outcome = Outcome(stage.name, "ok")
    path = sheet_of(stage, out)
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "figure" in entry:
            outcome.figures.append(entry["figure"])
        elif "note" in entry:
            outcome.notes[entry["note"]] = entry["value"]
        elif "failure" in entry:
            outcome.failures.append(entry)
        else:
            outcome.left_out.append(entry)
    return outcome
