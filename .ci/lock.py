"""Print the installed versions of all run-time dependencies: `python .ci/lock.py`.

`make lock` writes them to constraints.txt, with which the Docker image is built. Left out are torch's CUDA packages and
Triton, of which each release of torch requires exact versions, and the local part of torch's version (+cpu, +cu130), so
that the file serves both images.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
PINNED_BY_TORCH = re.compile(r"triton|nvidia-.*|cuda-.*")


def normal_name(name: str) -> str:
    """Return the name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_requirements() -> list[str]:
    """Return the run-time requirements of pyproject.toml."""
    requirements: list[str] = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    return requirements


def locked(requirements: list[str]) -> dict[str, str]:
    """Return name and installed version of every package that these requirements reach."""
    found: dict[str, str] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    visited: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = normal_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if PINNED_BY_TORCH.fullmatch(name):
            continue
        distribution = metadata.distribution(name)
        found[name] = Version(distribution.version).public
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in visited:
                visited.add((name, wanted))
                waiting += [(Requirement(text), wanted) for text in distribution.requires or ()]
    return dict(sorted(found.items()))


def main() -> None:
    """Print the lines of constraints.txt."""
    print("# Made by `make lock`: what the Docker image installs. pip install -c constraints.txt")
    for name, version in locked(direct_requirements()).items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
