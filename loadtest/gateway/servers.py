"""The measured servers: the gateway, and a bare uvicorn application that only writes, as the upper bound.

The gateway's engine is a `ClockEngine`, which emits tokens at a fixed rate instead of computing them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import Any

import uvicorn

from chatcache.cli.port_check import listen
from chatcache.cli.server import loop_factory, run_server, uvicorn_config
from chatcache.config import EngineConfig, ServerConfig
from loadtest.gateway.clock_engine import clock_tokenizer
from loadtest.gateway.ticks import TickClock, TickTimes, clock_from_environment, tick_text

_HEAD = (
    'data: {"id":"chatcmpl-06a1f2b3c4d5e6f708192a3b4c","object":"chat.completion.chunk","created":1790000000,'
    '"model":"clock","system_fingerprint":"chatcache-0.1.0","choices":[{"index":0,"delta":{"content":"'
)
_TAIL = '"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class BareLoop:
    """An ASGI application that writes prepared frames by the clock: a lower bound for a gateway."""

    def __init__(self, clock: TickClock, times: TickTimes) -> None:
        self._clock, self._times = clock, times
        self._phases: list[set[asyncio.Queue[str]]] = [set() for _ in range(clock.num_phases)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        await receive()
        is_socket = scope["type"] == "websocket"
        if is_socket:
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        frames: asyncio.Queue[str] = asyncio.Queue()
        phase = min(self._phases, key=len)
        phase.add(frames)
        try:
            while True:
                frame = await frames.get()
                if is_socket:
                    await send({"type": "websocket.send", "text": frame})
                else:
                    await send({"type": "http.response.body", "body": frame.encode(), "more_body": True})
        except (OSError, RuntimeError):
            pass  # the client closed the connection
        finally:
            phase.remove(frames)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        task = asyncio.create_task(self._run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._clock.delay_s()))
            tick = self._clock.advance()
            frame = _HEAD + tick_text(tick) + _TAIL
            self._times.record(tick)
            for frames in self._phases[tick % len(self._phases)]:
                frames.put_nowait(frame)


def main() -> int:
    """Run the server that the arguments describe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=("gateway", "bare"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--db", required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    config = ServerConfig(port=args.port, db=args.db, log_level="warning")
    if args.server == "gateway":
        engine = EngineConfig(model="clock", served_model_name="clock")
        return run_server(
            engine, config, build_engine="loadtest.gateway.clock_engine:build_engine", load=clock_tokenizer
        )
    logging.basicConfig(level="WARNING")
    app = BareLoop(*clock_from_environment())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(uvicorn.Server(uvicorn_config(app, config)).serve([listen(config.host, config.port)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
