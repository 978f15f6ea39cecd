"""pytest plugin of `tests.contracts.conformance`: writes the cases of clients, and what did not pass, to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

OUTPUT = "CHATCACHE_CASES"  # environment variable with the path of the file

_cases: list[tuple[str, str, str]] = []
_wrong: list[str] = []


def pytest_itemcollected(item: pytest.Item) -> None:
    client, refused = item.get_closest_marker("client"), item.get_closest_marker("refused")
    if client is None:
        _wrong.append(f"{item.nodeid}: no client marker")
    else:
        _cases.append((client.args[0], item.name, refused.args[0] if refused is not None else ""))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _wrong.append(f"{report.nodeid}: {report.when} {report.outcome}")


def pytest_sessionfinish() -> None:
    Path(os.environ[OUTPUT]).write_text(json.dumps({"cases": _cases, "wrong": _wrong}))
