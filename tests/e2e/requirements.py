"""Programs that the browser tests require."""

from __future__ import annotations

import os

import pytest


def require(there: bool, what: str, how: str) -> None:
    """Skip the test with the command that installs a missing program; fail under CI."""
    if there:
        return
    message = f"{what} is missing: {how}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
