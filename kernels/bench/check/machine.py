"""What was measured on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "msgspec")


def describe() -> dict[str, Any]:
    """Return date, chip, versions and revision."""
    import torch

    on_gpu = torch.cuda.is_available()
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "kind": "cuda" if on_gpu else "cpu",
        "chip": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "revision": _revision(),
        "msgspec": "real" if importlib.util.find_spec("msgspec") else "stand-in",
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cuda": torch.version.cuda,
        }
    return facts | {"versions": {name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the commit, with a + where files differ from it; None where there is no git."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
