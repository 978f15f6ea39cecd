"""`chatcache chat`: chat in the terminal.

A chat client is an engine in this process or a server reached by URL. Both yield the same pieces: `TextDelta` for each
part of a candidate's text, then one `Usage`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import httpx
import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from chatcache import factory
from chatcache.cli import options
from chatcache.config import EngineConfig
from chatcache.conversations.prompt import Message
from chatcache.conversations.replies.events import ReplyDelta, ReplyFinished
from chatcache.conversations.replies.service import ChatService
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError
from chatcache.types.request import MAX_N, GenerateRequest, SamplingParams

CONNECT_TIMEOUT_S = 5.0
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next part of the text of candidate `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer, yielded after its text."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class ChatClient(Protocol):
    """A model that answers a conversation; `name` is shown to the user."""

    name: str

    def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        """Stream the text of all candidates as they are generated, then the usage.

        Raises: ChatcacheError with a message for the user.
        """
        ...

    async def close(self) -> None: ...


class LocalChatClient:
    """Runs the engine in a thread of this process, through the gateway's chat service."""

    def __init__(self, service: ChatService, engine: ThreadedEngine, name: str) -> None:
        self.name = name
        self._service = service
        self._engine = engine
        self._numbers = itertools.count()

    @classmethod
    async def load(cls, config: EngineConfig, progress: factory.Progress) -> LocalChatClient:
        """Load the model.

        Raises: ModelFolderError.
        """
        engine = ThreadedEngine(lambda: factory.build_engine(config, progress))
        await engine.wait_loaded()
        return cls(ChatService(engine, factory.load_tokenizer(config)), engine, factory.served_name(config))

    async def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        prompt = await self._service.prompt(messages, "")
        request = GenerateRequest(request_id=f"chat-{next(self._numbers)}", prompt=prompt.token_ids, params=params)
        async with await self._service.start(request, prompt.text) as reply:
            async for event in reply.events():
                if isinstance(event, ReplyDelta):
                    yield TextDelta(event.index, event.text)
                elif isinstance(event, ReplyFinished):
                    yield Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)

    async def close(self) -> None:
        await self._engine.close()


class HttpChatClient:
    """Uses a server with OpenAI's chat completions API; only chatcache reports cached tokens."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Prepare the client. Raises: InvalidRequestError for a URL or a key that cannot be sent."""
        if api_key and not api_key.isascii():
            raise InvalidRequestError("the API key has a character that no key has", param="api_key")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._url = url.rstrip("/").removesuffix("/v1")
        try:
            self._client = httpx.AsyncClient(base_url=f"{self._url}/v1/", headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{url}: {error}", param="url") from None
        if (self._client.base_url.port or 0) > MAX_PORT:
            raise InvalidRequestError(f"{url}: ports end at {MAX_PORT}", param="url")
        self.name = ""

    async def connect(self) -> None:
        """Request the name of the server's model.

        Raises: EngineError if the server cannot be reached, returns an error or has another API.
        """
        try:
            response = await self._client.get("models")
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {error or type(error).__name__}") from None
        if response.is_error:
            raise _http_error(response.status_code, response.content)
        try:
            self.name = response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise EngineError(f"{self._url}: this is not a server with OpenAI's API") from None

    async def answer(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[TextDelta | Usage]:
        body = {
            "model": self.name,
            "messages": list(messages),
            "n": params.n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if params.max_tokens is None else {"max_tokens": params.max_tokens}),
            **({} if params.seed is None else {"seed": params.seed}),
        }
        try:
            async with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    raise _http_error(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    for piece in _parse_line(line):
                        yield piece
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {error or type(error).__name__}") from None

    async def close(self) -> None:
        await self._client.aclose()


def _parse_line(line: str) -> list[TextDelta | Usage]:
    """Parse one line of the event stream.

    Raises: EngineError for an error event.
    """
    if not line.startswith("data: ") or line == "data: [DONE]":
        return []
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise EngineError(chunk["error"]["message"])
    pieces: list[TextDelta | Usage] = [
        TextDelta(choice["index"], choice["delta"]["content"])
        for choice in chunk.get("choices", ())
        if choice["delta"].get("content")
    ]
    usage = chunk.get("usage")
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        pieces.append(Usage(usage["prompt_tokens"], cached, usage["completion_tokens"]))
    return pieces


def _http_error(status: int, body: bytes) -> ChatcacheError:
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = "no error message in the response"
    return EngineError(f"HTTP {status}: {message}")


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
    chat_template: options.ChatTemplate = "",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Chat in the terminal, with a model on this machine or a running server."""
    config = EngineConfig(
        model=model,
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        chat_template=chat_template,
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
                line.encode()  # raises for bytes that Python kept as surrogates
            except (EOFError, KeyboardInterrupt):
                return
            except UnicodeError:
                self._next_line = ""
                self.console.print("this line is not UTF-8 text", style="red")
                continue
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
        except (EOFError, UnicodeError):
            return 0
        if line.isdecimal():
            return int(line) - 1 if 1 <= int(line) <= len(answers) else 0
        self._next_line = line
        return 0
