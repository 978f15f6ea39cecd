"""The environment of a stage: device, size, deadline, and a file of JSON lines for results.

Each figure is appended at once, so a process that is killed leaves what it had measured.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from chatcache.bench.report import Figure


@dataclass(slots=True)
class StageContext:
    """Environment of one stage.

    `size`: full | cpu | tiny. `deadline_s` is a time of `time.monotonic`.
    """

    device: str
    size: str
    out: Path
    results: Path
    deadline_s: float = float("inf")
    num_failures: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def time_left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def add(self, *figures: Figure) -> None:
        """Print figures and store them. Goals are defined for GPUs and are removed elsewhere."""
        for figure in figures if self.on_gpu else [replace(figure, goal="") for figure in figures]:
            print(figure.line(), flush=True)
            self._write({"figure": asdict(figure)})

    def note(self, name: str, value: Any) -> None:
        """Store other data of any kind under a name: a profile, a list of times."""
        self._write({"note": name, "value": value})

    def skip(self, what: str, reason: str) -> None:
        """Record that `what` was not measured, and the reason."""
        print(f"skipped: {what} ({reason})", flush=True)
        self._write({"skipped": what, "reason": reason})

    def measure(self, what: str, work: Callable[[], None], needs_s: float = 0.0) -> None:
        """Run one part of the stage; if it raises, record the failure instead.

        The part is skipped if less than `needs_s` seconds are left.
        """
        if self.time_left_s < needs_s:
            self.skip(what, f"{self.time_left_s:.0f} s of this stage's time left, {needs_s:.0f} needed")
            return
        start = time.monotonic()
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.num_failures += 1
            self._write({"failure": what, "reason": f"{type(error).__name__}: {error}"[:2000]})
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        print(f"-- {what}: {time.monotonic() - start:.1f} s", flush=True)

    def _write(self, entry: dict[str, Any]) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
