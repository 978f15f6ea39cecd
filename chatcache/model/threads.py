"""How many threads a CPU model should compute with.

A team of threads waits for its slowest member at every operation. That member may not be running at all: a container
may allow fewer CPUs than it shows, and on a small box the gateway and the browser want a core too. A model that streams
few bytes per token gains next to nothing from a second thread (built-in model, 2 cores: 444 against 484 tokens/s) and
loses by a factor of ten when the cores are busy, so it gets one.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

SINGLE_THREAD_BYTES = 32 * 2**20


def limit_threads(weight_bytes: int) -> None:
    """Lower torch's thread count to what the machine allows and the model is worth; never raises it."""
    most = 1 if weight_bytes <= SINGLE_THREAD_BYTES else allowed_cpus()
    if most < torch.get_num_threads():
        torch.set_num_threads(most)


def allowed_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the CPUs this process may use: its affinity, and the control group's quota rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(affinity, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or "max"
        return affinity
