"""`chatcache chat`: chat in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from chatcache.cli import options
from chatcache.cli.chat_clients import ChatClient, HttpChatClient, LocalChatClient, Usage
from chatcache.config import EngineConfig
from chatcache.conversations.prompt import Message
from chatcache.errors import ChatcacheError
from chatcache.types.request import MAX_N, SamplingParams

HELP = f"""/n N        ask for N candidates (1 to {MAX_N}); then pick the one to continue with
/reset      start over        /system TEXT   set the system prompt and start over
/help       this              /quit          leave (or Ctrl-D; Ctrl-C stops an answer)"""

Url = Annotated[
    str | None,
    typer.Option(envvar=options.env("url"), show_envvar=False, help="Use this server instead of loading a model."),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar=options.env("api-key"), show_envvar=False, help="API key of the server."),
]
System = Annotated[str, typer.Option(help="System prompt.", show_default=False)]
Temperature = Annotated[
    float, options.float_option(min=0, max=2, help="Sampling temperature; 0: always the most likely token.")
]
TopP = Annotated[
    float, options.float_option(min=1e-6, max=1, help="Sample from the smallest set of tokens with this probability.")
]
MaxTokens = Annotated[
    int | None, options.integer_option(min=1, max=2**24, help="Maximum length of an answer; default: what fits.")
]
Seed = Annotated[
    int | None, options.integer_option(min=0, max=2**63 - 1, help="Seed; the same seed gives the same answers.")
]
N = Annotated[int, options.integer_option("--n", min=1, max=MAX_N, help="Candidates per answer.")]


def chat(
    model: options.Model = "",
    url: Url = None,
    api_key: Key = None,
    system: System = "",
    n: N = 1,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention_backend: options.AttentionBackend = "auto",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Chat in the terminal, with a model on this machine or a running server."""
    config = EngineConfig(
        model=model,
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        kv_memory_bytes=kv_memory,
        max_model_len=max_model_len,
    )
    params = SamplingParams(n=n, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    console = Console(highlight=False)
    session = Session(console, params, system)
    with asyncio.Runner() as runner:
        client = runner.run(_open(config, url, api_key, console))
        try:
            console.print(f"[dim]{escape(client.name)}. /help lists the commands.[/]")
            session.run(client, runner)
        finally:
            runner.run(client.close())


async def _open(config: EngineConfig, url: str | None, api_key: str | None, console: Console) -> ChatClient:
    if url is not None:
        remote = HttpChatClient(url, api_key)
        await remote.connect()
        return remote
    with console.status("loading") as status:
        return await LocalChatClient.load(config, lambda _, detail: status.update(detail))


class Session:
    """Conversation loop: reads lines, prints answers, keeps the history.

    `read_line` raises EOFError at the end of the input.
    """

    def __init__(
        self, console: Console, params: SamplingParams, system: str = "", read_line: Callable[[str], str] = input
    ) -> None:
        self.console = console
        self._params = params
        self._system = system
        self._read_line = read_line
        self._next_line = ""
        self.messages: list[Message] = []
        self._reset()

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def run(self, client: ChatClient, runner: asyncio.Runner) -> None:
        """Converse until the input ends or /quit.

        Lines are read outside the event loop, so that Ctrl-C at the prompt exits at once.
        """
        while True:
            try:
                line = self._next_line or self._read_line("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            self._next_line = ""
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                self._turn(line, client, runner)

    def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self._reset()
            self.console.print("[dim]a new conversation[/]")
        elif name == "/system":
            self._system = rest
            self._reset()
            self.console.print("[dim]a new conversation with this system prompt[/]")
        elif name == "/n" and rest.isdecimal() and 1 <= int(rest) <= MAX_N:
            self._params = msgspec.structs.replace(self._params, n=int(rest))
            self.console.print(f"[dim]{rest} candidate(s) per answer[/]")
        else:
            self.console.print(HELP, markup=False)

    def _turn(self, text: str, client: ChatClient, runner: asyncio.Runner) -> None:
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        answers = [""] * self._params.n
        try:
            runner.run(self._stream(client, messages, answers))
        except KeyboardInterrupt:
            self.console.print("[dim] (stopped)[/]")
        except ChatcacheError as error:
            self.console.print(error.message, style="red", markup=False)
            return
        chosen = self._choose(answers) if len(answers) > 1 else 0
        self.messages = [*messages, {"role": "assistant", "content": answers[chosen]}]

    async def _stream(self, client: ChatClient, messages: list[Message], answers: list[str]) -> None:
        """Print a single candidate as it streams, several when they are complete.

        The lines of several candidates would interleave.
        """
        usage: Usage | None = None
        async for piece in client.answer(messages, self._params):
            if isinstance(piece, Usage):
                usage = piece
                continue
            answers[piece.index] += piece.text
            if len(answers) == 1:
                self.console.print(piece.text, end="", markup=False, soft_wrap=True)
        self.console.print()
        if len(answers) > 1:
            for number, answer in enumerate(answers, start=1):
                self.console.print(f"[bold cyan]{number}[/]", end="  ")
                self.console.print(answer, markup=False, soft_wrap=True)
        if usage is not None:
            self.console.print(
                f"[dim]{usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} from cache; "
                f"{usage.num_output_tokens} new[/]"
            )

    def _choose(self, answers: list[str]) -> int:
        """Let the user pick the candidate to continue with; return its index.

        A line that is not a number is the next message and continues the first candidate.
        """
        try:
            line = self._read_line(f"continue with 1-{len(answers)} [1], or write the next message: ").strip()
        except EOFError:
            return 0
        if line.isdecimal():
            return int(line) - 1 if 1 <= int(line) <= len(answers) else 0
        self._next_line = line
        return 0
