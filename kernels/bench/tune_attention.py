"""Time all launch configurations of attention on this chip: python3 kernels/bench/tune_attention.py --out DIR

The same as `gpu_check.py --tune`. Needs a GPU; a few minutes. DIR/tune.jsonl ranks every configuration for each entry
of `chatcache_kernels/triton/configs.py`; the table says what today's entries lose to the winners.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:] = [str(ROOT), str(ROOT / "kernels"), *(entry for entry in sys.path if entry != str(HERE.parent))]


def main() -> int:
    """Measure and rank."""
    import torch

    from bench.check import tune
    from bench.check.context import Context

    parser = argparse.ArgumentParser(description="Time all launch configurations of attention on this chip.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for tune.jsonl")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: there is nothing to tune", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    sheet = arguments.out / "tune.jsonl"
    sheet.unlink(missing_ok=True)
    context = Context("cuda", "full", arguments.out, sheet, time.monotonic() + arguments.seconds)
    tune.run(context)
    return 1 if context.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
