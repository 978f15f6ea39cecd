"""Find words outside plain technical English: `python -m tests.support.language [PATH ...]`.

Docstrings, comments and the names that a file defines are read; string literals and names defined elsewhere are not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# Words that stand for a standard term. Pronouns for people: name the caller, client, request or tenant. Verbs of
# speech: data is sent, received, returned, reported or raised. Metaphors: use the term of the field.
WORDS = {
    "anybody": "client, caller, request",
    "everybody": "all clients, every request",
    "nobody": "no client, no request",
    "somebody": "a client, a request",
    "whoever": "the caller, the client",
    "hears": "receives",
    "heard": "received",
    "told": "sent, reported, stored",
    "tells": "reports, returns",
    "beside": "next to, in addition to",
    "canary": "reference request",
    "dice": "random client",
    "neighbour": "other server, adjacent",
    "nemesis": "fault injector",
    "planted": "injected",
    "spoilt": "corrupted",
    "survivor": "recoverable request",
    "survivors": "recoverable requests",
    "twin": "negative control",
    "verdict": "result",
    "verdicts": "results",
}
PHRASES = {
    "as it comes": "unchanged",
    "by hand": "manually",
    "comes to the same": "is equivalent",
    "goes on": "continues",
    "in the house": "in the project",
    "let in": "admitted, authenticated",
    "lies in": "is stored in",
    "what is left of": "the rest of",
}
NAME_WORDS = {"tell": "send, report, emit", "door": "admission", "steady": "decode batch", "hear": "receive"}

_PROSE = re.compile(r"\b(" + "|".join([*WORDS, *PHRASES]) + r")\b", re.IGNORECASE)
# A file without any of these, even inside a longer word, need not be parsed.
_ANYWHERE = re.compile("|".join([*WORDS, *PHRASES, *NAME_WORDS]), re.IGNORECASE)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class Finding(NamedTuple):
    """A word at a line of a file, and what to write instead."""

    path: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: write {self.instead}"


def in_prose(text: str) -> Iterator[tuple[int, str, str]]:
    """Lines (from 0), words and replacements of a docstring or comment."""
    for number, line in enumerate(text.splitlines()):
        for match in _PROSE.finditer(line):
            word = match[1].lower()
            yield number, word, WORDS.get(word) or PHRASES[word]


def in_name(name: str) -> Iterator[tuple[str, str]]:
    """Words and replacements of an identifier in snake_case or CamelCase."""
    for part in _PART.findall(name):
        word = part.lower()
        if instead := WORDS.get(word) or NAME_WORDS.get(word):
            yield word, instead


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names that a module defines: functions, classes, parameters, variables and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """First lines and texts of the docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def findings(path: Path, source: str) -> list[Finding]:
    """All findings of one Python file."""
    if not _ANYWHERE.search(source):
        return []
    tree = ast.parse(source)
    found: list[Finding] = []
    for first, text in docstrings(tree):
        found += [Finding(path, first + number, word, instead) for number, word, instead in in_prose(text)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += [Finding(path, token.start[0], word, instead) for _, word, instead in in_prose(token.string)]
    for line, name in defined_names(tree):
        found += [Finding(path, line, f"{word} (in {name})", instead) for word, instead in in_name(name)]
    return sorted(set(found))


def check(paths: list[Path]) -> list[Finding]:
    """Findings of all Python files at or below `paths`."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [found for file in files if "node_modules" not in file.parts for found in findings(file, file.read_text())]


def main() -> None:
    """Print the findings and exit with status 1 if there are any."""
    found = check([Path(name) for name in sys.argv[1:]] or [ROOT / "chatcache", ROOT / "kernels", ROOT / "loadtest"])
    print("\n".join(map(str, found)))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
