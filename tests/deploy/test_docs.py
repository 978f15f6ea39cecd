"""Test the shell commands of the documents against the Makefile and the Compose file."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.gateway.documents import ALL_PAGES, DOCS, ROOT, blocks

PAGES = [*ALL_PAGES, ROOT / "CONTRIBUTING.md", ROOT / "loadtest" / "README.md", ROOT / "kernels" / "README.md"]
LINES = [line for page in PAGES for block in blocks(page) if not block.language for line in block.text.splitlines()]
COMPOSE = [line for line in LINES if "docker compose" in line]


def _targets(text: str) -> set[str]:
    return set(re.findall(r"^(?:`|\| `)?make ([a-z][a-z-]*)", text, re.MULTILINE)) | set(
        re.findall(r"`make ([a-z][a-z-]*)", text)
    )


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {target for page in PAGES for target in _targets(page.read_text(encoding="utf-8"))}
    assert {"serve", "test"} <= shown
    assert not shown - targets


@pytest.mark.parametrize("line", COMPOSE)
def test_documented_compose_command_names_existing_services(line: str) -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    words = shlex.split(line, comments=True)
    profiles = {words[at + 1] for at, word in enumerate(words) if word == "--profile"}
    assert profiles <= {profile for service in composed.values() for profile in service["profiles"]}
    if "exec" in words:
        service = words[words.index("exec") + 1]
        assert set(composed[service]["profiles"]) & profiles


def test_documented_compose_variables_are_those_of_the_file() -> None:
    section = (DOCS / "deployment.md").read_text().partition("## Docker Compose\n")[2].partition("\n## ")[0]
    documented = {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in row.split("`")[1::2]}
    used = set(re.findall(r"\$\{([A-Z_]+)[:}-]", (ROOT / "docker-compose.yml").read_text()))
    assert documented == used
