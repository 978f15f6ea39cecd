"""Hide the package `triton` from a Python process with this file on its path, and from its children."""

from __future__ import annotations

import sys

sys.modules["triton"] = None  # type: ignore[assignment]
