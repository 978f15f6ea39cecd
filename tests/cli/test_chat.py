"""`chatcache chat`: a session with a scripted client, the HTTP client, and the command."""

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

from chatcache.cli.chat import HttpChatClient, Session, TextDelta, Usage
from chatcache.conversations.prompt import Message
from chatcache.errors import EngineError
from chatcache.types.request import SamplingParams
from tests.cli.servers import OPTIONS, Server, environment


class Echo:
    """Chat client that answers with the candidate's index and the last message, in two deltas."""

    name = "echo"

    def __init__(self) -> None:
        self.requests: list[list[Message]] = []

    async def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        self.requests.append(list(messages))
        if messages[-1]["content"] == "fail":
            raise EngineError("[no] such luck")
        for index in range(params.n):
            yield TextDelta(index, f"{index}:")
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        for index in range(params.n):
            yield TextDelta(index, messages[-1]["content"])
        yield Usage(10, 7, params.n)

    async def close(self) -> None: ...


def script(*lines: str) -> Callable[[str], str]:
    """Return a replacement of `input` that returns these lines, then raises EOFError."""
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        for line in rest:
            return line
        raise EOFError

    return read_line


def converse(*lines: str, n: int = 1, system: str = "") -> tuple[Echo, Session, str]:
    client, out = Echo(), io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    session = Session(console, SamplingParams(n=n), system, script(*lines))
    with asyncio.Runner() as runner:
        session.run(client, runner)
    return client, session, out.getvalue()


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_session_second_turn_sends_the_history() -> None:
    client, session, out = converse("one", "", "two")
    assert client.requests[1] == [message("user", "one"), message("assistant", "0:one"), message("user", "two")]
    assert session.messages[-1] == message("assistant", "0:two")
    assert "0:one" in out and "10 prompt tokens, 7 from cache; 1 new" in out


def test_session_with_several_candidates_continues_the_chosen_one() -> None:
    client, _, out = converse("/n 3", "one", "2", "/n 1", "two")
    assert client.requests[1][1] == message("assistant", "1:one")
    assert "1  0:one\n2  1:one\n3  2:one\n" in out


def test_session_line_instead_of_a_choice_is_the_next_message() -> None:
    client, _, out = converse("/n 3", "one", "two", "/help", "", "/n 1", "three")
    assert client.requests[1] == [message("user", "one"), message("assistant", "0:one"), message("user", "two")]
    assert client.requests[2][-1] == message("user", "three")
    assert "/reset" in out


@pytest.mark.parametrize("choice", ["", "0", "4"])
def test_session_invalid_choice_selects_the_first_candidate(choice: str) -> None:
    client, _, _ = converse("one", choice, "two", "", n=3)
    assert client.requests[1][1] == message("assistant", "0:one")


def test_session_reset_and_system_start_a_new_conversation() -> None:
    client, _, _ = converse("one", "/reset", "two", "/system Be brief.", "three", system="Be kind.")
    assert client.requests[1] == [message("system", "Be kind."), message("user", "two")]
    assert client.requests[2] == [message("system", "Be brief."), message("user", "three")]


@pytest.mark.parametrize("line", ["/help", "/n", "/n 0", "/n 65", "/n two", "/what"])
def test_session_unknown_command_prints_the_help(line: str) -> None:
    client, _, out = converse(line)
    assert "/reset" in out and not client.requests


def test_session_quit_ends_before_the_input_ends() -> None:
    assert not converse("/quit", "one")[0].requests


def test_session_failed_turn_is_reported_and_removed_from_the_history() -> None:
    client, session, out = converse("fail", "one")
    assert "[no] such luck" in out
    assert client.requests[1] == [message("user", "one")]
    assert len(session.messages) == 2


def test_session_line_that_is_not_utf8_is_refused_and_the_conversation_continues() -> None:
    client, session, out = converse("one", "caf\udce9", "two")
    assert "not UTF-8" in out
    assert client.requests[1] == [message("user", "one"), message("assistant", "0:one"), message("user", "two")]
    assert len(session.messages) == 4


def test_session_stopped_answer_stays_in_the_history() -> None:
    client, _, out = converse("stop", "one")
    assert "(stopped)" in out
    assert client.requests[1] == [message("user", "stop"), message("assistant", "0:"), message("user", "one")]


async def collect(client: HttpChatClient, params: SamplingParams) -> tuple[dict[int, str], Usage | None]:
    texts: dict[int, str] = {}
    usage = None
    async for piece in client.answer([message("user", "Hello there")], params):
        if isinstance(piece, Usage):
            usage = piece
        else:
            texts[piece.index] = texts.get(piece.index, "") + piece.text
    return texts, usage


@pytest.mark.parametrize("path", ["", "/", "/v1"])
async def test_http_chat_client_deltas_add_up_to_the_servers_answer(server: Server, path: str) -> None:
    client = HttpChatClient(server.url + path, None)
    await client.connect()
    assert client.name == "tiny-llama"
    texts, usage = await collect(client, SamplingParams(n=2, max_tokens=8, seed=4))
    body = {"messages": [message("user", "Hello there")], "n": 2, "max_tokens": 8, "seed": 4, "temperature": 1}
    async with httpx.AsyncClient() as http:
        whole = (await http.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)).json()
    assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"] if c["message"]["content"]}
    assert usage is not None and usage.num_prompt_tokens == whole["usage"]["prompt_tokens"]
    assert usage.num_output_tokens == whole["usage"]["completion_tokens"]
    await client.close()


async def test_http_chat_client_raises_the_servers_error_message(server: Server) -> None:
    client = HttpChatClient(server.url, None)
    await client.connect()
    with pytest.raises(EngineError, match=r"HTTP 400: .*temperature"):
        await collect(client, SamplingParams(temperature=3.0))
    await client.close()


async def test_http_chat_client_refuses_a_server_with_another_api() -> None:
    for body in ("<html>", "[]", '{"data": []}', '{"data": [5]}'):
        client = HttpChatClient("http://127.0.0.1:1", None)
        found = httpx.MockTransport(lambda request, body=body: httpx.Response(200, text=body))
        client._client = httpx.AsyncClient(base_url="http://127.0.0.1:1/v1/", transport=found)
        with pytest.raises(EngineError, match="not a server with OpenAI's API"):
            await client.connect()
        await client.close()


async def test_http_chat_client_names_an_unreachable_server() -> None:
    client = HttpChatClient("http://127.0.0.1:9", None)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9"):
        await client.connect()
    await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True], ids=["in process", "by url"])
def test_chat_command_second_turn_hits_the_prefix_cache(
    server: Server, folder: Path, tmp_path: Path, remote: bool
) -> None:
    where = ["--url", server.url] if remote else [str(folder), *OPTIONS[2:]]
    command = [sys.executable, "-m", "chatcache", "chat", *where, "--max-tokens", "5", "--temperature", "0"]
    done = subprocess.run(
        command, input="Hello\nMore\n", capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=180
    )
    assert done.returncode == 0, done.stderr
    usage_lines = [line for line in done.stdout.splitlines() if "from cache" in line]
    assert len(usage_lines) == 2
    prompt, cached = (int(usage_lines[1].split()[index]) for index in (0, 3))
    assert 0 < cached < prompt


def test_chat_command_reports_an_unreachable_server_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chatcache", "chat", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=180)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "http://127.0.0.1:9" in done.stderr
