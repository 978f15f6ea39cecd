"""A running server, asked the way a browser and a client ask it: what is between must let streams and sockets by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from chatcache.cli.doctor.findings import Finding, bad, good, warning

TIMEOUT_S = 30.0
HELD_BACK_SHARE = 0.1  # of the time since asking; what comes within less was held back
NUM_TOKENS = 48
PROXY = "between you and the server something"


def server(url: str, api_key: str | None) -> Iterator[Finding]:
    """Ask a server. Ends early where the rest could not be asked."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S) as client:
        try:
            ready = client.get("/readyz")
            body = ready.json()
        except (httpx.HTTPError, ValueError) as error:
            yield bad("Server", f"{base}: {error or type(error).__name__}", "is the address right, and the server up?")
            return
        if ready.status_code != 200:
            yield bad(
                "Server", f"{base}: {body.get('detail') or body}", "wait until the model is loaded, or see its log"
            )
            return
        yield good("Server", f"{base} serves {body.get('model')}")
        if (models := client.get("/v1/models")).status_code != 200:
            yield bad("API key", _message(models), "--api-key KEY")
            return
        yield _stream(client)
    yield _socket(base, api_key)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


def _stream(client: httpx.Client) -> Finding:
    """Ask for an answer as a stream, and look at when its pieces come."""
    what = "Streams"
    request = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    arrived: list[float] = []
    start = time.perf_counter()
    try:
        with client.stream("POST", "/v1/chat/completions", json=request) as answer:
            if answer.status_code != 200:
                answer.read()
                return bad(what, _message(answer), "see the server's log")
            arrived.extend(time.perf_counter() - start for _ in answer.iter_raw())
    except httpx.HTTPError as error:
        return bad(what, f"the stream broke off: {error}", f"{PROXY} ends long answers: raise its read timeout")
    if len(arrived) < 2 or arrived[-1] - arrived[0] < HELD_BACK_SHARE * arrived[-1]:
        return warning(
            what,
            f"{NUM_TOKENS} tokens came in {len(arrived)} pieces, all at the end",
            f"{PROXY} holds streams back: nginx wants proxy_buffering off, others the like",
        )
    return good(
        what, f"the first of {len(arrived)} pieces after {arrived[0]:.2f} s, the last after {arrived[-1]:.2f} s"
    )


def _socket(base: str, api_key: str | None) -> Finding:
    what = "WebSocket"
    parts = urlsplit(base)
    secure = "wss" if parts.scheme == "https" else "ws"
    address = urlunsplit((secure, parts.netloc, f"{parts.path}/v1/responses", "", ""))
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with connect(
            address,
            subprotocols=[Subprotocol("chatcache.v1")],
            additional_headers=headers,
            open_timeout=TIMEOUT_S,
            proxy=None,
        ) as socket:
            first = msgspec.json.decode(socket.recv(timeout=TIMEOUT_S))
    except InvalidStatus as error:
        return bad(
            what, f"refused: status {error.response.status_code}", f"{PROXY} must pass Upgrade and Connection on"
        )
    except (OSError, WebSocketException, ValueError, TimeoutError) as error:
        return bad(what, f"{type(error).__name__}: {error}", f"{PROXY} does not let sockets by")
    if not isinstance(first, dict) or first.get("type") != "session.created":
        return bad(what, "another kind of server answers there", "is the address right?")
    return good(what, "opens, and the server greets")
