"""Check and measure kernels and engine on this machine.

Run `python3 kernels/bench/gpu_check.py --out DIR`, at most nine minutes on one GPU. Needs torch, triton, numba,
transformers and pytest, but no package of the gateway.

Every stage runs in a process of its own with its own time limit and does not depend on the success of the others; the
figures that a failed stage had measured are kept. `kernels/bench/check/stages.py` lists the stages. Writes
DIR/gpu_check.json after each stage and DIR/tests.log after the tests, and nothing else there; ends with a short table.
The exit status is 1 if a stage failed; a missed goal is no failure.

Without a GPU: tests under Triton's interpreter, the limits and kernels of the CPU, a small model. `--dry-run` runs
every stage of a GPU without one: a sample of the same tests, which launches every kernel, interpreted and with tensors
of an emulated device, and all figures at meaningless sizes on the CPU; commands and files are those of the real run.
`--quick` leaves these tests out.
`--tune` times the launch configurations of attention instead.
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
    """Run all stages, or the one that an internal option names."""
    parser = argparse.ArgumentParser(description="Check and measure kernels and engine on this machine.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for gpu_check.json and tests.log")
    parser.add_argument("--dry-run", action="store_true", help="run the stages of a GPU on the CPU, sizes meaningless")
    parser.add_argument("--quick", action="store_true", help="run every stage at meaningless sizes, without GPU tests")
    parser.add_argument("--only", metavar="TEXT", default="", help="run the stages whose names contain this")
    parser.add_argument("--skip", metavar="TEXT", help="leave out the stages whose names contain this")
    parser.add_argument("--tune", action="store_true", help="time the launch configurations of attention instead")
    parser.add_argument("--seconds", type=float, help="time limit of the whole run; default: 540, of a dry run 1,200")
    parser.add_argument("--size", choices=("full", "cpu", "tiny", "dry"), help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out.resolve()
    if arguments.stage:
        return _run_stage(arguments.stage, arguments.size, out, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:  # figures and model folders of the stages
        return _run_stages(out, pathlib.Path(work), arguments)


def _run_stage(name: str, size: str, out: pathlib.Path, seconds: float) -> int:
    import torch

    from bench.check.stages import find_stage, run_here

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return 1 if run_here(find_stage(name, size), device, size, out, seconds) else 0


def _run_stages(out: pathlib.Path, work: pathlib.Path, arguments: argparse.Namespace) -> int:
    from bench.check.stages import NOT_MEASURED, STAGES, TOTAL_S, TUNE, Outcome, compare_stages, figures_of, run_apart
    from chatcache.bench.report import describe_machine, write_json

    end = time.monotonic() + (arguments.seconds or (1200 if arguments.dry_run else TOTAL_S))
    machine = describe_machine()
    size = "dry" if arguments.dry_run else "tiny" if arguments.quick else "full" if machine["kind"] == "cuda" else "cpu"
    if arguments.tune and machine["kind"] != "cuda":
        print("no GPU: there is nothing to tune", file=sys.stderr)
        return 2
    skipped = [{"skipped": what, "reason": why} for what, why in NOT_MEASURED.get(size, {}).items()]
    report: dict[str, Any] = {"machine": machine, "size": size, "skipped": skipped, "stages": []}
    outcomes: list[Outcome] = []
    for stage in (TUNE,) if arguments.tune else STAGES[size]:
        if arguments.only not in stage.name or (arguments.skip is not None and arguments.skip in stage.name):
            continue
        left_s = end - time.monotonic() - 5
        print(f"\n== {stage.name} ({max(left_s, 0):.0f} s left)", flush=True)
        if left_s < 10:
            outcomes.append(Outcome(stage.name, "skipped", skipped=[{"skipped": stage.name, "reason": "no time left"}]))
        else:
            outcomes.append(run_apart(stage, size, work, min(stage.limit_s, left_s)))
        report["stages"] = [dataclasses.asdict(outcome) for outcome in outcomes]
        report["across"] = [dataclasses.asdict(figure) for figure in compare_stages(figures_of(outcomes))]
        write_json(out / "gpu_check.json", report)
        if (work / "tests.log").exists():
            shutil.copyfile(work / "tests.log", out / "tests.log")
    _print_summary(report, outcomes)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _print_summary(report: dict[str, Any], outcomes: list[Any]) -> None:
    from bench.check.stages import compare_stages, figures_of, select_for_table
    from chatcache.bench.report import figure_table, format_table

    print(f"\n{json.dumps(report['machine'])}")
    rows = [
        (outcome.name, outcome.status, f"{outcome.seconds:.1f} s", f"{len(outcome.figures)} figures")
        for outcome in outcomes
    ]
    print(format_table(("stage", "status", "time", ""), rows, "<<>>"))
    for entry in (*report["skipped"], *(entry for outcome in outcomes for entry in outcome.skipped)):
        print(f"skipped: {entry['skipped']} ({entry['reason']})")
    for entry in (entry for outcome in outcomes for entry in outcome.failures):
        print(f"FAILED {entry['failure']}: {entry['reason'].splitlines()[0] if entry['reason'] else 'no reason given'}")
    figures = figures_of(outcomes)
    print(figure_table(select_for_table([*figures, *compare_stages(figures)])))


if __name__ == "__main__":
    sys.exit(main())
