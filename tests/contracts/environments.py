"""Python clients in environments of their own (`make clients`): their requirements exclude those of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import MODEL

FOLDER = Path(__file__).resolve().parent


def python_of(environment: str) -> Path:
    return Path(sys.prefix) / environment / "bin" / "python"


def run_in(environment: str, script: str, url: str) -> dict[str, Any]:
    """Run a script of `environment`'s folder against a server, and return the JSON of its last line."""
    python = python_of(environment)
    if not python.exists():
        pytest.skip(f"the environment {environment} is not installed: make clients")
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "SERVER": url,
        "MODEL": MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [str(python), str(FOLDER / environment / script)], env=variables, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
