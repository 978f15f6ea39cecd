"""On the path of a Python process, hide the package `triton` from it and its children: as if it were not installed."""

from __future__ import annotations

import sys

sys.modules["triton"] = None  # type: ignore[assignment]
