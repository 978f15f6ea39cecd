"""An OpenAI-compatible server: what it accepts, prompts of exact length, and one streamed completion.

`connect` finds out by a few small requests whether the server takes token ids as prompt, `ignore_eos` and
`return_token_ids`. A server that takes text only gets text built to measure: words of one token each, according to its
`/tokenize` route (vLLM's form or llama.cpp's) or to a tokenizer file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx

MIN_WORDS = 16
NUM_PROBE_TOKENS = 8
_WORD_TEXT = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house service
friend father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education the of and to in is it you that he was for on are"""
WORDS = _WORD_TEXT.split()

PromptEncoder = Callable[[Sequence[int]], list[int] | str]
TokenCounter = Callable[[str], Awaitable[list[int]]]


class ServerError(Exception):
    """The server cannot be measured."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to reach and to address a server.

    `model`: default: the first that the server lists. `prompts`: auto | ids | text. `token_ids`: range to draw from.
    `tokenizer`: a tokenizer.json, for servers that take text and have no /tokenize.
    """

    name: str
    url: str
    model: str | None = None
    api_key: str | None = None
    prompts: str = "auto"
    token_ids: range = range(200, 1000)
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was found to work.

    `encode` turns units below `num_units` into as many tokens of a prompt, to which the server adds
    `num_special_tokens`.
    """

    name: str
    url: str
    model: str
    encode: PromptEncoder
    num_units: int
    api_key: str | None = None
    num_special_tokens: int = 0
    takes_token_ids: bool = False
    takes_ignore_eos: bool = False
    returns_token_ids: bool = False

    def request(self, prompt: list[int] | str, num_output_tokens: int, *, with_token_ids: bool = False) -> bytes:
        """Return the HTTP request of a streamed completion."""
        body = self.body(prompt, num_output_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        if with_token_ids and self.returns_token_ids:
            body["return_token_ids"] = True
        data = json.dumps(body).encode()
        target = urlsplit(self.url)
        head = [
            f"POST {target.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"host: {target.netloc}",
            "content-type: application/json",
            f"content-length: {len(data)}",
            "connection: close",
            *([f"authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + data

    def body(self, prompt: list[int] | str, num_output_tokens: int) -> dict[str, Any]:
        """Return the fields of a completion of exactly that length, if the server takes `ignore_eos`."""
        fields = {"model": self.model, "prompt": prompt, "max_tokens": num_output_tokens, "temperature": 0.0}
        return fields | ({"ignore_eos": True} if self.takes_ignore_eos else {})


# -- what a server accepts ----------------------------------------------------------------------------------------


async def connect(options: ServerOptions) -> Server:
    """Probe a server. Raises: ServerError, with the reason, if it cannot be measured."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=120.0) as http:
        try:
            model = options.model or await _first_model(http)
            ids = options.token_ids
            server = Server(
                options.name, options.url, model, lambda units: [ids[unit] for unit in units], len(ids), options.api_key
            )
            if options.prompts != "ids" and not await _takes_token_ids(http, server, options.prompts):
                server = await _with_text_prompts(http, server, options)
            else:
                server = replace(server, takes_token_ids=True)
            prompt = server.encode(_last_units(server))
            status, answer = await _complete(http, replace(server, takes_ignore_eos=True), prompt)
            server = replace(server, takes_ignore_eos=status == 200)
            if status != 200:
                status, answer = await _complete(http, server, prompt)
            if status != 200:
                raise ServerError(f"{options.url}: a completion failed with status {status}: {answer}")
            status, answer = await _complete(http, server, prompt, return_token_ids=True)
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, ValueError) as error:
            raise ServerError(f"{options.url} does not answer as expected: {error!r}") from error
        return replace(server, returns_token_ids=status == 200 and bool(answer["choices"][0].get("token_ids")))


async def _first_model(http: httpx.AsyncClient) -> str:
    response = await http.get("/v1/models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


async def _complete(
    http: httpx.AsyncClient, server: Server, prompt: list[int] | str, **fields: object
) -> tuple[int, Any]:
    """Return the status and the body, or the text of an error, of a completion of two tokens."""
    response = await http.post("/v1/completions", json=server.body(prompt, 2) | fields)
    return response.status_code, response.json() if response.status_code == 200 else response.text[:300]


def _last_units(server: Server) -> range:
    """Return the highest units: token ids beyond a small vocabulary are found out at once."""
    return range(max(server.num_units - NUM_PROBE_TOKENS, 0), server.num_units)


async def _takes_token_ids(http: httpx.AsyncClient, server: Server, prompts: str) -> bool:
    if prompts == "text":
        return False
    status, answer = await _complete(http, server, server.encode(_last_units(server)))
    return status == 200 and answer["usage"]["prompt_tokens"] == len(_last_units(server))


async def _with_text_prompts(http: httpx.AsyncClient, server: Server, options: ServerOptions) -> Server:
    """Return the server with prompts made of words that are one token each, whatever precedes them."""
    tokenize = _file_tokenizer(options.tokenizer) if options.tokenizer else _http_tokenizer(http, server.model)
    words: dict[int, str] = {}  # by token id, so that different words are different tokens
    num_special = len(await tokenize(""))
    for word in WORDS:
        ids = await tokenize(f" {word}" * 4)
        if len(ids) == num_special + 4 and len(set(ids[-4:])) == 1:
            words.setdefault(ids[-1], word)
    if len(words) < MIN_WORDS:
        raise ServerError(f"{options.url}: only {len(words)} of {len(WORDS)} common words are one token each")
    alphabet = list(words.values())

    def encode(units: Sequence[int]) -> str:
        return "".join(f" {alphabet[unit]}" for unit in units)

    units = [number % len(alphabet) for number in range(100)]
    num_tokens = len(await tokenize(encode(units))) - num_special
    if num_tokens != len(units):
        raise ServerError(f"{options.url}: a text of {len(units)} words has {num_tokens} tokens")
    return replace(server, encode=encode, num_units=len(alphabet), num_special_tokens=num_special)


def _http_tokenizer(http: httpx.AsyncClient, model: str) -> TokenCounter:
    async def tokenize(text: str) -> list[int]:
        body = {"model": model, "prompt": text, "content": text, "add_special": True}  # vLLM's form and llama.cpp's
        response = await http.post("/tokenize", json=body)
        if response.status_code != 200:
            raise ServerError(f"{http.base_url}: takes no token ids and has no /tokenize; give a --tokenizer")
        return list(response.json()["tokens"])

    return tokenize


def _file_tokenizer(path: Path) -> TokenCounter:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))

    async def tokenize(text: str) -> list[int]:
        return list(backend.encode(text).ids)

    return tokenize


# -- one completion -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Completion:
    """What one request returned. Times are seconds of the event loop's clock.

    `token_times_s`: arrival of each event with text or tokens. `finished_s`: of the last event of the reply. `error`:
    name of the failure, or "". `detail`: its text.
    """

    started_s: float = 0.0
    finished_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    detail: str = ""


class _Stream(asyncio.Protocol):
    """Sends one request and records each received event with its time. Parsed by httptools, decoded only at the end."""

    def __init__(self, request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._request, self._loop = request, loop
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None
        self.events: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[str] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}" if exc else "")  # without an exception: the end of the body, or too early

    def on_body(self, body: bytes) -> None:
        now_s = self._loop.time()
        *events, self._buffer = (self._buffer + body).replace(b"\r\n", b"\n").split(b"\n\n")
        self.events += [(now_s, event) for event in events]

    def on_message_complete(self) -> None:
        self._end("")

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def rest(self) -> bytes:
        """The body of an answer that is no event stream."""
        return b"\n\n".join([*(event for _, event in self.events), self._buffer])

    def _end(self, error: str) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def complete(server: Server, request: bytes, timeout_s: float) -> Completion:
    """Send a request and return its completion, also a failed one; nothing is raised."""
    loop = asyncio.get_running_loop()
    target, found = urlsplit(server.url), Completion(started_s=loop.time())
    stream = _Stream(request, loop)
    try:
        async with asyncio.timeout(timeout_s):
            is_tls = target.scheme == "https"
            port = target.port or (443 if is_tls else 80)
            await loop.create_connection(lambda: stream, target.hostname or "", port, ssl=is_tls or None)
            found.error = await stream.ended
    except TimeoutError:
        found.error = "timeout"
    except OSError as error:
        found.error, found.detail = "no connection", str(error)
    finally:
        found.ended_s = loop.time()
        stream.close()
    if not found.error and stream.status != 200:
        found.error = f"HTTP {stream.status}" if stream.status else "connection closed"
        found.detail = stream.rest.decode(errors="replace")[:300]
    _read_events(stream.events, found)
    return found


def _read_events(events: Sequence[tuple[float, bytes]], found: Completion) -> None:
    """Add the tokens, the usage and an error event of a stream to a completion."""
    is_complete = False
    for at_s, event in events:
        data = b"".join(line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if data == b"[DONE]":
            is_complete = True
        if not data or data == b"[DONE]":
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            found.error, found.detail = found.error or "invalid event", data[:300].decode(errors="replace")
            return
        if "error" in chunk:
            error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": str(chunk["error"])}
            found.error = f"error event {error.get('code') or error.get('type') or ''}".strip()
            found.detail = str(error.get("message"))[:300]
            return
        choices = chunk.get("choices") or []
        found.finished_s = at_s if choices else found.finished_s
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        text = "".join(choice.get("text") or "" for choice in choices)
        if ids or text:
            found.token_times_s.append(at_s)
            found.token_ids += ids
            found.text += text
        _read_usage(chunk.get("usage"), found)
    if not found.error and not is_complete:
        found.error = "stream ended early"
    if (
        found.num_output_tokens and found.finished_s and not found.token_times_s
    ):  # tokens without text, such as a part of a character
        found.token_times_s.append(found.finished_s)
    if not found.error and not found.token_times_s:
        found.error = "no tokens"


def _read_usage(usage: dict[str, Any] | None, found: Completion) -> None:
    if usage:
        found.num_prompt_tokens, found.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        found.num_cached_tokens = details.get("cached_tokens")
