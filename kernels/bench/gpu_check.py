"""Check and measure kernels and engine on whatever this machine has: python3 kernels/bench/gpu_check.py --out DIR

At most nine minutes on one GPU. Needs torch, triton, numba, transformers and pytest, no package of the web or the bus.
Every stage runs in a process of its own with its own time limit and survives the failure of the others; what it had
measured by then is kept. `kernels/bench/check/__init__.py` lists the stages. Writes DIR/gpu_check.json after each of
them, DIR/tests.log after the tests, and nothing else there; ends with a short table. Exit status 1 if a stage failed; a
goal missed is no failure.

Without a GPU: tests under Triton's interpreter, the CPU's ceilings and kernels, a small model. --quick: every stage at
sizes that say nothing, to see that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:] = [str(ROOT), str(ROOT / "kernels"), *(entry for entry in sys.path if entry != str(HERE.parent))]


def main() -> int:
    """Run every stage, or the one named."""
    parser = argparse.ArgumentParser(description="Check and measure kernels and engine on whatever this machine has.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for gpu_check.json and tests.log")
    parser.add_argument("--quick", action="store_true", help="run every stage at sizes that say nothing")
    parser.add_argument("--only", metavar="TEXT", help="run the stages whose names contain this")
    parser.add_argument("--tune", action="store_true", help="time the attention configurations instead")
    parser.add_argument("--size", choices=("full", "cpu", "tiny"), help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit of the whole run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out.resolve()
    if arguments.stage:
        return _one_stage(arguments.stage, arguments.size, out, arguments.seconds)
    if arguments.tune:
        return _tune(out)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:  # sheets and model folders of the stages
        return _all_stages(out, pathlib.Path(work), arguments.quick, arguments.only or "", arguments.seconds)


def _one_stage(name: str, size: str, out: pathlib.Path, seconds: float) -> int:
    import torch

    from bench.check.stages import STAGES, run_here

    stage = next(stage for stage in STAGES[size] if stage.name == name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return 1 if run_here(stage, device, size, out, seconds) else 0


def _tune(out: pathlib.Path) -> int:
    import subprocess

    from bench.check.stages import environment

    script = HERE.parent / "tune_attention.py"
    return subprocess.run([sys.executable, str(script), "--out", str(out)], env=environment(), check=False).returncode


def _all_stages(out: pathlib.Path, work: pathlib.Path, quick: bool, only: str, seconds: float) -> int:
    from bench.check.figures import table
    from bench.check.goals import across_stages, all_figures, in_table
    from bench.check.machine import describe
    from bench.check.stages import LEFT_OUT, STAGES, Outcome, run_apart

    end = time.monotonic() + seconds
    machine = describe()
    size = "tiny" if quick else "full" if machine["kind"] == "cuda" else "cpu"
    left_out = [{"left_out": what, "why": why} for what, why in LEFT_OUT.get(size, {}).items()]
    report: dict[str, Any] = {"machine": machine, "size": size, "left_out": left_out, "stages": []}
    outcomes: list[Outcome] = []
    for stage in STAGES[size]:
        if only not in stage.name:
            continue
        left_s = end - time.monotonic() - 5
        print(f"\n== {stage.name} ({max(left_s, 0):.0f} s left)", flush=True)
        if left_s < 10:
            outcomes.append(Outcome(stage.name, "left out", left_out=[{"left_out": stage.name, "why": "no time left"}]))
        else:
            outcomes.append(run_apart(stage, size, work, min(stage.limit_s, left_s)))
        report["stages"] = [dataclasses.asdict(outcome) for outcome in outcomes]
        report["across"] = [figure.as_json() for figure in across_stages(all_figures(outcomes))]
        (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
        if (work / "tests.log").exists():
            shutil.copyfile(work / "tests.log", out / "tests.log")
    figures = all_figures(outcomes)
    print(f"\n{json.dumps(machine)}")
    for outcome in outcomes:
        print(f"{outcome.name:24} {outcome.ended:9} {outcome.seconds:6.1f} s  {len(outcome.figures)} figures")
    for entry in (*left_out, *(entry for outcome in outcomes for entry in outcome.left_out)):
        print(f"left out: {entry['left_out']} ({entry['why']})")
    for entry in (entry for outcome in outcomes for entry in outcome.failures):
        print(f"FAILED {entry['failure']}: {entry['reason'].splitlines()[0] if entry['reason'] else 'no reason given'}")
    print(table(in_table([*figures, *across_stages(figures)])))
    return 1 if any(outcome.failures for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
