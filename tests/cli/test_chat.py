"""The terminal chat: a session over a scripted backend, over a real server, and the command itself."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from chatcache.cli.backends import Delta, HttpBackend, Usage
from chatcache.cli.chat import Session
from chatcache.conversations.prompt import Message
from chatcache.errors import EngineError
from chatcache.types.request import SamplingParams
from tests.cli.servers import OPTIONS, Server, environment


class Echo:
    """Answers each candidate with its index and what was asked, in two pieces."""

    name = "echo"

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    async def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[Delta | Usage]:
        self.asked.append(list(messages))
        if messages[-1]["content"] == "fail":
            raise EngineError("[no] such luck")
        for index in range(params.n):
            yield Delta(index, f"{index}:")
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        for index in range(params.n):
            yield Delta(index, messages[-1]["content"])
        yield Usage(10, 7, params.n)

    async def close(self) -> None: ...


def script(*lines: str) -> Callable[[str], str]:
    """An `input` that types these lines and then ends."""
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        for line in rest:
            return line
        raise EOFError

    return read_line


def converse(*lines: str, n: int = 1, system: str = "") -> tuple[Echo, Session, str]:
    backend, out = Echo(), io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    session = Session(console, SamplingParams(n=n), system, script(*lines))
    with asyncio.Runner() as runner:
        session.run(backend, runner)
    return backend, session, out.getvalue()


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_turns_build_on_each_other() -> None:
    backend, session, out = converse("one", "", "two")
    assert backend.asked[1] == [said("user", "one"), said("assistant", "0:one"), said("user", "two")]
    assert session.messages[-1] == said("assistant", "0:two")
    assert "0:one" in out and "10 prompt tokens, 7 from cache; 1 new" in out


def test_several_candidates_are_shown_and_one_goes_on() -> None:
    backend, _, out = converse("/n 3", "one", "2", "/n 1", "two")
    assert backend.asked[1][1] == said("assistant", "1:one")
    assert "1  0:one\n2  1:one\n3  2:one\n" in out


def test_a_line_that_is_no_choice_is_the_next_message() -> None:
    backend, _, out = converse("/n 3", "one", "two", "/help", "", "/n 1", "three")
    assert backend.asked[1] == [said("user", "one"), said("assistant", "0:one"), said("user", "two")]
    assert backend.asked[2][-1] == said("user", "three")
    assert "/reset" in out


@pytest.mark.parametrize("choice", ["", "0", "4"])
def test_no_valid_choice_is_the_first(choice: str) -> None:
    backend, _, _ = converse("one", choice, "two", "", n=3)
    assert backend.asked[1][1] == said("assistant", "0:one")


def test_reset_and_system_start_over() -> None:
    backend, _, _ = converse("one", "/reset", "two", "/system Be brief.", "three", system="Be kind.")
    assert backend.asked[1] == [said("system", "Be kind."), said("user", "two")]
    assert backend.asked[2] == [said("system", "Be brief."), said("user", "three")]


@pytest.mark.parametrize("line", ["/help", "/n", "/n 0", "/n 65", "/n two", "/what"])
def test_help_is_shown_for_it_and_for_what_is_not_understood(line: str) -> None:
    backend, _, out = converse(line)
    assert "/reset" in out and not backend.asked


def test_quit_ends_before_the_input_does() -> None:
    assert not converse("/quit", "one")[0].asked


def test_a_failed_turn_is_told_and_forgotten() -> None:
    backend, session, out = converse("fail", "one")
    assert "[no] such luck" in out
    assert backend.asked[1] == [said("user", "one")]
    assert len(session.messages) == 2


def test_a_stopped_answer_keeps_what_came() -> None:
    backend, _, out = converse("stop", "one")
    assert "(stopped)" in out
    assert backend.asked[1] == [said("user", "stop"), said("assistant", "0:"), said("user", "one")]


async def collect(backend: HttpBackend, params: SamplingParams) -> tuple[dict[int, str], Usage | None]:
    texts: dict[int, str] = {}
    usage = None
    async for piece in backend.answer([said("user", "Hello there")], params):
        if isinstance(piece, Usage):
            usage = piece
        else:
            texts[piece.index] = texts.get(piece.index, "") + piece.text
    return texts, usage


@pytest.mark.parametrize("path", ["", "/", "/v1"])
async def test_over_http_the_pieces_are_the_servers_answer(server: Server, path: str) -> None:
    backend = HttpBackend(server.url + path, None)
    await backend.connect()
    assert backend.name == "tiny-llama"
    texts, usage = await collect(backend, SamplingParams(n=2, max_tokens=8, seed=4))
    body = {"messages": [said("user", "Hello there")], "n": 2, "max_tokens": 8, "seed": 4, "temperature": 1}
    async with httpx.AsyncClient() as client:
        whole = (await client.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)).json()
    assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"] if c["message"]["content"]}
    assert usage is not None and usage.num_prompt_tokens == whole["usage"]["prompt_tokens"]
    assert usage.num_output_tokens == whole["usage"]["completion_tokens"]
    await backend.close()


async def test_a_refusal_over_http_is_one_sentence(server: Server) -> None:
    backend = HttpBackend(server.url, None)
    await backend.connect()
    with pytest.raises(EngineError, match=r"HTTP 400: .*max_tokens"):
        await collect(backend, SamplingParams(max_tokens=100_000))
    await backend.close()


async def test_a_server_that_is_not_there_is_named() -> None:
    backend = HttpBackend("http://127.0.0.1:9", None)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9"):
        await backend.connect()
    await backend.close()


@pytest.mark.parametrize("remote", [False, True], ids=["in process", "by url"])
def test_the_command_chats_and_hits_the_cache(server: Server, folder: Path, tmp_path: Path, remote: bool) -> None:
    where = ["--url", server.url] if remote else [str(folder), *OPTIONS[2:]]
    command = [sys.executable, "-m", "chatcache", "chat", *where, "--max-tokens", "5", "--temperature", "0"]
    done = subprocess.run(
        command, input="Hello\nMore\n", capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=180
    )
    assert done.returncode == 0, done.stderr
    figures = [line for line in done.stdout.splitlines() if "from cache" in line]
    assert len(figures) == 2
    prompt, cached = (int(figures[1].split()[place]) for place in (0, 3))
    assert 0 < cached < prompt


def test_the_command_ends_with_one_line_when_nothing_can_be_reached(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chatcache", "chat", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=180)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "http://127.0.0.1:9" in done.stderr
