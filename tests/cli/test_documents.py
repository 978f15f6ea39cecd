"""Flags and commands shown in the documents exist in the CLI."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from loadtest.open_loop.command import add_arguments
from tests.cli.configuration_page import PAGE, commands, page, parameters
from tests.gateway.documents import ALL_PAGES, ROOT, command_lines

GUIDES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "kernels/README.md", "loadtest/README.md")]
# Flags of other programs that the documents show.
FOREIGN = {
    *(
        "--profile",
        "--scale",
        "--from-literal",
        "--build",
        "--build-arg",
        "--aclfile",
        "--appendonly",
        "--appendfsync",
        "--bind",
        "--dir",
        "--maxmemory-policy",
        "--save",
        "--tls-auth-clients",
        "--tls-ca-cert-file",
        "--tls-cert-file",
        "--tls-key-file",
        "--tls-port",
        "--data-binary",
        "--enable-prompt-tokens-details",
    ),  # docker, kubectl, redis-server, curl, vLLM
    *(
        "--users",
        "--turns",
        "--minutes",
        "--seed",
        "--out",
        "--repeats",
        "--processes",
        "--workers",
    ),  # our load tests and fault injection
    *(
        "--rootdir",
        "--tune",
        "--arch",
        "--only",
        "--skip",
        "--quick",
        "--dry-run",
        "--note",
    ),  # pytest, the kernels' benchmarks, studies
}
COMMANDS = [line for document in ALL_PAGES for line in command_lines(document, "chatcache")]


def _flags_of_the_cli() -> set[str]:
    every = [option for _, command in commands() for option in parameters(command) if option.is_option]
    load = argparse.ArgumentParser()
    add_arguments(load)
    flags = {flag for option in every for flag in option.flags} | set(load._option_string_actions)
    return flags | {"--help", "--version", "--config"}


def _flags_shown(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


@pytest.mark.parametrize("document", [*ALL_PAGES, *GUIDES], ids=lambda each: each.name)
def test_document_flags_exist_in_the_cli(document: Path) -> None:
    unknown = _flags_shown(document.read_text(encoding="utf-8")) - _flags_of_the_cli() - FOREIGN
    assert not unknown, f"{document.name} shows flags that no command has: {sorted(unknown)}"


def test_unknown_flag_in_a_document_is_found() -> None:
    assert _flags_shown("use `--kv-memmory 2GiB`") - _flags_of_the_cli() - FOREIGN == {"--kv-memmory"}


def test_configuration_page_matches_the_options() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.cli.configuration_page"


@pytest.fixture(scope="module")
def parser() -> typer.Typer:
    """Build the CLI with commands that parse their options and do nothing."""
    root, groups = typer.Typer(), dict[str, typer.Typer]()
    for name, command in commands():
        *above, last = name.split()[1:]
        group = root
        if above:
            group = groups.setdefault(above[0], typer.Typer(name=above[0]))
        group.command(last)(functools.wraps(command)(lambda **_: None))
    for group in groups.values():
        root.add_typer(group)
    return root


def _parse(parser: typer.Typer, line: str) -> Result:
    return CliRunner().invoke(parser, shlex.split(line, comments=True)[1:], env={"NO_COLOR": "1"})


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_command_line_parses(parser: typer.Typer, line: str) -> None:
    given = re.sub(r"redis://\.\.\.|\$REDIS\b", "redis://127.0.0.1:6379/0", line)
    result = _parse(parser, re.split(r" [>|] ", given)[0])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("line", ["chatcache serve --prot 9000", "chatcache keys make", "chatcache keys create"])
def test_wrong_command_line_is_refused(parser: typer.Typer, line: str) -> None:
    assert _parse(parser, line).exit_code == 2
    assert len(COMMANDS) >= 10
