"""The processes that are measured: `python -m loadtest.gateway.served gateway|bare --port N --core N --db PATH`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import Any

import uvicorn

from chatcache.cli.server import listen, loop_factory, run_server, uvicorn_config
from chatcache.config import EngineConfig, ServerConfig
from loadtest.gateway.clock import clock_tokenizer
from loadtest.gateway.ticks import Beat, Ticks, from_environment, tick_text

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
    """An ASGI application that writes frames made beforehand, at the clock's rate: what no gateway can go below."""

    def __init__(self, beat: Beat, ticks: Ticks) -> None:
        self._beat, self._ticks = beat, ticks
        self._phases: list[set[asyncio.Queue[str]]] = [set() for _ in range(beat.num_phases)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
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
            pass  # the client left
        finally:
            phase.remove(frames)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        task = asyncio.create_task(self._run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._beat.delay_s()))
            tick = self._beat.advance()
            frame = _HEAD + tick_text(tick) + _TAIL
            self._ticks.note(tick)
            for frames in self._phases[tick % len(self._phases)]:
                frames.put_nowait(frame)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("gateway", "bare"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--db", required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    config = ServerConfig(port=args.port, db=args.db, log_level="warning")
    if args.what == "gateway":
        engine = EngineConfig(model="clock", served_model_name="clock")
        return run_server(engine, config, build_engine="loadtest.gateway.clock:build_engine", load=clock_tokenizer)
    logging.basicConfig(level="WARNING")
    app = BareLoop(*from_environment())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(uvicorn.Server(uvicorn_config(app, config)).serve([listen(config.host, config.port)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
