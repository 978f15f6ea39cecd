"""The conformance page against the contract tests; the cases themselves run as tests of this tier."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.contracts.conformance import CLIENTS, PAGE, Case, case_name, page, without_versions
from tests.gateway.documents import ROOT


@pytest.mark.slow
def test_page_has_the_cases_of_the_tests() -> None:
    command = [sys.executable, "-m", "tests.contracts.conformance", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_client_of_the_page_has_passed_and_refused_cases() -> None:
    rows = [
        line.split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith(tuple(f"| {c} | " for c in CLIENTS))
    ]
    table = {row[0].removeprefix("| "): row for row in rows if len(row) == 4}
    assert set(table) == set(CLIENTS)
    for client, (_, version, passed, refused) in table.items():
        assert version[0].isdigit() and int(passed) >= 4 and int(refused.removesuffix(" |")) >= 1, client


def test_page_with_another_case_differs_and_with_another_version_does_not() -> None:
    cases = [Case(client, f"works ({number})", "") for client in CLIENTS for number in "ab"]
    one, other = (page(cases, dict.fromkeys(CLIENTS, version)) for version in ("1.0", "2.0.1"))
    assert one != other and without_versions(one) == without_versions(other)
    refused = page([*cases, Case("litellm", "images", "400: text only")], dict.fromkeys(CLIENTS, "1.0"))
    assert "| litellm | images | 400: text only |" in refused and without_versions(refused) != without_versions(one)
    assert "- works (2 cases)" in one
    with pytest.raises(SystemExit, match="elsewhere"):
        page([*cases, Case("elsewhere", "works", "")], dict.fromkeys(CLIENTS, "1"))


def test_case_name_reads_as_a_sentence() -> None:
    assert case_name("test_image_input") == "image input"
    assert case_name("test_mode_returns[md_json]") == "mode returns (md_json)"
    assert case_name("test_refused[image in chat]") == "image in chat"
