"""What a stage is given, and where its figures go: a file of JSON lines, so that a stage killed keeps what it had."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.check.figures import Figure


@dataclass(slots=True)
class Context:
    """One stage's surroundings. `size`: full | cpu | tiny. `deadline_s` is on `time.monotonic`'s clock."""

    device: str
    size: str
    out: Path
    sheet: Path
    deadline_s: float = float("inf")
    num_failures: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def time_left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def add(self, *figures: Figure) -> None:
        """Print figures and keep them. Goals are those of a GPU: elsewhere there are none."""
        for figure in figures if self.on_gpu else [replace(figure, goal="") for figure in figures]:
            print(figure.line(), flush=True)
            self._write({"figure": figure.as_json()})

    def note(self, name: str, value: Any) -> None:
        """Keep what is no figure: a profile, a list of times."""
        self._write({"note": name, "value": value})

    def left_out(self, what: str, why: str) -> None:
        """Say plainly what was not measured."""
        print(f"left out: {what} ({why})", flush=True)
        self._write({"left_out": what, "why": why})

    def measure(self, what: str, work: Callable[[], None], needs_s: float = 0.0) -> None:
        """Do one part of the stage; its failure is noted and is its own. `needs_s`: left out with less time left."""
        if self.time_left_s < needs_s:
            self.left_out(what, f"{self.time_left_s:.0f} s of this stage's time left, it needs {needs_s:.0f}")
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
        with self.sheet.open("a") as file:
            file.write(json.dumps(entry) + "\n")
