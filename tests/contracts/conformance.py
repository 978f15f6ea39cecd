"""Generate the conformance page from a run of the contract tests.

Usage: `python -m tests.contracts.conformance` runs the cases of all clients, which must pass, and writes the page;
`--check` only collects them and compares them with the page, without the versions: the second tier runs them itself.
A case is a test marked `client`; one that is also marked `refused` checks that the client gets a reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.contracts import case_recorder
from tests.contracts.environments import python_of
from tests.gateway.documents import DOCS, ROOT

PAGE = DOCS / "conformance.md"
FOLDER = Path(__file__).resolve().parent
# Modules whose tests are not cases of a client in the table: coding agents, event streams, this page, the demo model.
OTHERS = (
    *("claude_client", "codex_client", "opencode_client"),
    *("sse_framing_matrix", "conformance", "demo_model_tools"),
)

_INTRODUCTION = """\
# Conformance

<!-- Generated from a run of the contract tests by `python -m tests.contracts.conformance`. Do not edit. -->

Official clients, unchanged, against a running server. A case passed, or it was refused with a reason that the client
shows; none fails silently. The model behind the server is scripted, so a case is about the API and not about what a
model writes. Coding agents (Codex, Claude Code, opencode) have tests of their own.

"""


class Case(NamedTuple):
    """One case of a client. `refusal`: the reason that the client gets, "" if the case succeeds."""

    client: str
    name: str
    refusal: str


def case_name(test: str) -> str:
    """Return the sentence that the name of a test stands for, with its parameters in brackets."""
    name, _, parameters = test.removeprefix("test_").removesuffix("]").partition("[")
    if name == "refused":
        return parameters
    return name.replace("_", " ") + (f" ({parameters})" if parameters else "")


def gather(*, run: bool) -> list[Case]:
    """Collect all cases in the order of the tests; with `run`, run them. Raises: SystemExit unless all pass."""
    modules = sorted(str(path) for path in FOLDER.glob("test_*.py") if not path.stem.endswith(OTHERS))
    options = ["--tier", "all", "-q", "-p", "no:xdist", "-p", case_recorder.__name__]
    if not run:
        options.append("--collect-only")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "cases.json"
        environment = {**os.environ, case_recorder.OUTPUT: str(output)}
        command = [sys.executable, "-m", "pytest", *modules, *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=None if run else subprocess.DEVNULL)
        found = json.loads(output.read_text())
    if done.returncode or found["wrong"]:
        raise SystemExit("\n".join(["not every case passed:", *found["wrong"]]))
    return [Case(client, case_name(name), refusal) for client, name, refusal in found["cases"]]


def _python(package: str, environment: str = "") -> Callable[[], str]:
    def version() -> str:
        if not environment:
            return importlib.metadata.version(package)
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.check_output([str(python_of(environment)), "-c", code], text=True).strip()

    return version


def _npm(package: str) -> Callable[[], str]:
    def version() -> str:
        described = (FOLDER / "node" / "node_modules" / package / "package.json").read_text()
        return str(json.loads(described)["version"])

    return version


CLIENTS: Mapping[str, Callable[[], str]] = {
    "openai (Python)": _python("openai"),
    "openai (Node)": _npm("openai"),
    "anthropic (Python)": _python("anthropic"),
    "anthropic (TypeScript)": _npm("@anthropic-ai/sdk"),
    "openai-agents": _python("openai-agents", "frameworks"),
    "langchain-openai": _python("langchain-openai"),
    "litellm": _python("litellm", "litellm"),
    "instructor": _python("instructor", "frameworks"),
    "AI SDK": _npm("ai"),
    "ollama (Python)": _python("ollama"),
    "ollama (Node)": _npm("ollama"),
}


def page(cases: Sequence[Case], versions: Mapping[str, str]) -> str:
    """Write the page: a table of the clients, the refusals, and all cases of each client."""
    unknown = {case.client for case in cases} ^ set(CLIENTS)
    if unknown:
        raise SystemExit(f"clients without cases, or cases of other clients: {sorted(unknown)}")
    lines = [_INTRODUCTION + "| client | version | passed | refused |", "|---|---|---|---|"]
    for client in CLIENTS:
        refused = [case for case in cases if case.client == client and case.refusal]
        passed = [case for case in cases if case.client == client and not case.refusal]
        lines.append(f"| {client} | {versions[client]} | {len(passed)} | {len(refused)} |")
    lines += ["", "## Refused", "", "| client | case | what the client gets |", "|---|---|---|"]
    for case in _in_order(cases):
        if case.refusal:
            lines.append(f"| {case.client} | {_cell(case.name)} | {_cell(case.refusal)} |")
    lines += ["", "## Passed", ""]
    for client in CLIENTS:
        names = [case.name for case in cases if case.client == client and not case.refusal]
        lines += [f"**{client}**", "", *(f"- {name}" for name in _without_parameters(names)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _in_order(cases: Iterable[Case]) -> list[Case]:
    order = list(CLIENTS)
    return sorted(cases, key=lambda case: order.index(case.client))


def _without_parameters(names: Sequence[str]) -> list[str]:
    """Merge the cases of one test into a line with their number."""
    counts: dict[str, int] = {}
    for name in names:
        base = name.partition(" (")[0]
        counts[base] = counts.get(base, 0) + 1
    return [f"{name} ({count} cases)" if count > 1 else name for name, count in counts.items()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def without_versions(text: str) -> str:
    """Remove the versions of the clients from a page."""
    return re.sub(r"^(\| [^|]+ \|) [\d.]+ (\| \d+ \| \d+ \|)$", r"\1 \2", text, flags=re.MULTILINE)


def main(arguments: Sequence[str]) -> None:
    if "--check" in arguments:
        written = PAGE.read_text(encoding="utf-8")
        fresh = page(gather(run=False), dict.fromkeys(CLIENTS, "0"))
        if without_versions(fresh) != without_versions(written):
            raise SystemExit(f"{PAGE.name} differs from the tests: run python -m tests.contracts.conformance")
        return
    cases = gather(run=True)
    PAGE.write_text(page(cases, {client: version() for client, version in CLIENTS.items()}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
