"""What the browser tests cannot do without."""

from __future__ import annotations

import os

import pytest


def need(there: bool, what: str, how: str) -> None:
    """Skip with the line that helps; where everything must be there (CI), fail."""
    if there:
        return
    message = f"{what} is missing: {how}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
