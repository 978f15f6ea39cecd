"""The documents of the repository: where they are, and their code blocks, links and words."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import chatcache.gateway

DOCS = Path(chatcache.gateway.__file__).with_name("docs")
ROOT = DOCS.parents[2]
FRONT_PAGE = ROOT / "README.md"
API_PAGES = sorted(DOCS.glob("*.md"))
ALL_PAGES = [FRONT_PAGE, *API_PAGES]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block; `output` is the text block that directly follows it, or ""."""

    page: str
    language: str
    text: str
    output: str


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order; lines that end in a backslash are joined."""
    text = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    return [
        Block(page.name, match[1], match[2].replace("\\\n", " "), _output(text, match, following))
        for match, following in itertools.zip_longest(found, found[1:])
        if match[1] != "text"
    ]


def _output(text: str, block: re.Match[str], following: re.Match[str] | None) -> str:
    if following is None or following[1] != "text" or text[block.end() : following.start()].strip():
        return ""
    return following[2]


def command_lines(page: Path, command: str) -> list[str]:
    """Lines of code blocks without a language that start with `command`."""
    return [
        line
        for block in blocks(page)
        if not block.language
        for line in block.text.splitlines()
        if line.startswith(f"{command} ")
    ]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def documented() -> set[str]:
    """Every word or phrase in backticks on the API pages."""
    return {match for page in API_PAGES for match in re.findall(r"`([^`\n]+)`", prose(page))}
