"""The stages of the check, and running each in a process of its own with a time limit."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.check.context import StageContext
from chatcache.bench.report import ROOT, Figure, compare

TOTAL_S = 540.0
GRACE_S = 3.0  # a stage ends by itself at its limit; it is killed this long after it
BARE = ROOT / "kernels" / "bench" / "bare"
PEER = "transformers continuous batching"
PEER_GOAL = ">= 3.00"


@dataclass(frozen=True, slots=True)
class Stage:
    """`bench.check.<module>.<function>(context, *arguments)`, killed after `limit_s`."""

    name: str
    target: str
    limit_s: float
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """The results of a stage, and its status: ok | failed | killed | skipped."""

    name: str
    status: str
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)


STAGES: dict[str, tuple[Stage, ...]] = {
    "full": (
        Stage("tests", "run_tests.run", 180),
        Stage("limits", "limits.run", 30),
        Stage("decode kernels", "attention.run_decode", 75),
        Stage("model qwen3-0.6b", "model.run", 70, ("qwen3-0.6b",)),
        Stage("model llama3-8b", "model.run", 80, ("llama3-8b",)),
        Stage("FP8 model llama3-8b", "model.run_fp8", 60, ("llama3-8b",)),
        Stage("sampling", "sampling.run", 35),
        Stage("prefill kernels", "attention.run_prefill", 35),
        Stage("layer kernels", "layers.run", 45),
        Stage("small kernels", "small_kernels.run", 35),
        Stage("offline qwen3-0.6b", "offline.run", 55, ("qwen3-0.6b",)),
        Stage("FP8 layers", "fp8.run", 60),
        Stage("transformers qwen3.5-0.8b", "transformers_models.run", 75, ("qwen3.5-0.8b",)),
        Stage("transformers qwen3-moe-1b", "transformers_models.run", 60, ("qwen3-moe-1b",)),
        Stage("studies qwen3-0.6b", "studies.run", 60, ("qwen3-0.6b",)),
        Stage("planning", "planning.run", 20),
        Stage("peer qwen3-0.6b", "offline.run_transformers", 70, ("qwen3-0.6b",)),
        Stage("offline llama3-8b", "offline.run", 100, ("llama3-8b",)),
    ),
    "cpu": (
        Stage("tests", "run_tests.run", 400),
        Stage("limits", "limits.run", 30),
        Stage("decode kernels", "attention.run_decode", 150),
        Stage("prefill kernels", "attention.run_prefill", 60),
        Stage("small kernels", "small_kernels.run", 60),
        Stage("sampling", "sampling.run", 60),
        Stage("layer kernels", "layers.run", 60),
        Stage("model smollm2-135m", "model.run", 90, ("smollm2-135m",)),
        Stage("transformers tiny", "transformers_models.run", 60, ("tiny",)),
        Stage("planning", "planning.run", 30),
        Stage("studies smollm2-135m", "studies.run", 90, ("smollm2-135m",)),
    ),
    "tiny": (
        Stage("tests", "run_tests.run", 120),
        Stage("limits", "limits.run", 60),
        Stage("decode kernels", "attention.run_decode", 60),
        Stage("prefill kernels", "attention.run_prefill", 60),
        Stage("small kernels", "small_kernels.run", 60),
        Stage("sampling", "sampling.run", 60),
        Stage("layer kernels", "layers.run", 60),
        Stage("FP8 layers", "fp8.run", 60),
        Stage("FP8 model tiny", "model.run_fp8", 60, ("tiny",)),
        Stage("model tiny", "model.run", 60, ("tiny",)),
        Stage("offline tiny", "offline.run", 60, ("tiny",)),
        Stage("peer tiny", "offline.run_transformers", 60, ("tiny",)),
        Stage("transformers tiny", "transformers_models.run", 60, ("tiny",)),
        Stage("planning", "planning.run", 30),
        Stage("studies tiny", "studies.run", 60, ("tiny",)),
    ),
}
STAGES["dry"] = (Stage("tests", "run_tests.run_emulated", 600), *STAGES["tiny"][1:])
TUNE = Stage("tune attention", "tune.run", 200)
NOT_MEASURED = {
    "cpu": {
        "CUDA graphs, compiled Triton kernels": "no GPU here; the tests run Triton kernels under the interpreter",
        "Qwen3-0.6B and Llama-3-8B shapes, the offline queue, transformers": "too large for a CPU",
    },
    "tiny": {"all useful sizes": "--quick only tests that every stage runs"},
    "dry": {"all useful sizes, compiled kernels, CUDA graphs": "--dry-run only tests that every stage runs"},
}


def find_stage(name: str, size: str) -> Stage:
    """Return the stage with this name."""
    return next(stage for stage in (*STAGES[size], TUNE) if stage.name == name)


def environment(size: str = "") -> dict[str, str]:
    """Return a stage's environment, with the stand-in for msgspec where that is missing, and in a dry run."""
    path = [str(ROOT), str(ROOT / "kernels")]
    if size == "dry" or importlib.util.find_spec("msgspec") is None:
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
    """Run a stage in this process; return how many of its parts failed. A dry run measures tiny sizes."""
    context = StageContext(
        device, "tiny" if size == "dry" else size, out, results_path(stage, out), time.monotonic() + limit_s
    )
    module, function = stage.target.split(".")
    getattr(importlib.import_module(f"bench.check.{module}"), function)(context, *stage.arguments)
    return context.num_failures


def run_apart(stage: Stage, size: str, out: Path, limit_s: float, grace_s: float = GRACE_S) -> Outcome:
    """Run a stage in its own process, kill it at the limit, and read its results."""
    results_path(stage, out).unlink(missing_ok=True)
    script = ROOT / "kernels" / "bench" / "gpu_check.py"
    command = [sys.executable, str(script), "--out", str(out), "--size", size, "--stage", stage.name]
    command += ["--seconds", f"{limit_s:.1f}"]
    print(f"$ {shlex.join(command)}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment(size), start_new_session=True)
    try:
        status: int | None = process.wait(limit_s + grace_s)
    except subprocess.TimeoutExpired:
        status = None
    _kill_group(process)
    outcome = read_results(stage, out)
    outcome.seconds = time.monotonic() - start
    if status is None:
        outcome.failures.append({"failure": stage.name, "reason": f"killed at its limit of {limit_s:.0f} s"})
    elif status and not outcome.failures:
        outcome.failures.append({"failure": stage.name, "reason": f"its process ended with {status}"})
    outcome.status = "killed" if status is None else "failed" if outcome.failures else "ok"
    return outcome


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, unless they have ended already."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def results_path(stage: Stage, out: Path) -> Path:
    """Return the file that a stage writes its results to."""
    return out / f"{stage.name.replace(' ', '-')}.jsonl"


def read_results(stage: Stage, out: Path) -> Outcome:
    """Read the results of a stage; a line that a kill cut short is ignored."""
    outcome = Outcome(stage.name, "ok")
    path = results_path(stage, out)
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
            outcome.skipped.append(entry)
    return outcome


# -- figures of all stages ----------------------------------------------------------------------------------------


def figures_of(outcomes: Iterable[Outcome]) -> list[Figure]:
    """Return the figures of all stages."""
    return [Figure.from_json(data) for outcome in outcomes for data in outcome.figures]


def compare_stages(figures: Iterable[Figure]) -> list[Figure]:
    """Return figures made of two stages: our tokens/s over the peer's, on the same work."""
    by_name = {figure.name: figure for figure in figures}
    found = []
    for name, peer in by_name.items():
        model, _, rest = name.partition(": ")
        ours = by_name.get(f"{model}: {rest.removeprefix(f'{PEER}, ')}")
        if rest.startswith(PEER) and ours is not None:
            label = f"{model}: over {PEER}, same work"
            found.append(compare(label, ours.value, "tokens/s", peer.value, PEER, PEER_GOAL))
    return found


def select_for_table(figures: Iterable[Figure]) -> list[Figure]:
    """Return the figures with a goal, missed ones last; without goals, those with a limit."""
    figures = list(figures)
    with_goal = [figure for figure in figures if figure.met is not None]
    return sorted(with_goal, key=lambda figure: figure.met is False) or [
        one for one in figures if one.ratio is not None
    ]
