"""Frames of 1 MB on one WebSocket: eleven long responses for each of 16 streams, of which one may run at a time."""

from __future__ import annotations

import asyncio
import json

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from loadtest.attacks.harness import Attack, Target

NUM_STREAMS = 16
NUM_FRAMES = 176
_FRAME_BYTES = 1_000_000


async def run(target: Target) -> None:
    """Send the frames on one connection after another until cancelled; the server may close each early."""
    frames = [_frame(stream) for stream in range(NUM_STREAMS)]
    url = f"ws://127.0.0.1:{target.port}/v1/responses"
    headers = {"authorization": f"Bearer {target.attacker_key}"}
    while True:
        async with connect(url, additional_headers=headers, max_size=None) as socket:
            try:
                for number in range(NUM_FRAMES):
                    await socket.send(frames[number % NUM_STREAMS], text=True)
                while True:
                    await socket.recv()
            except ConnectionClosed:
                await asyncio.sleep(0.1)


def _frame(stream: int) -> bytes:
    fields = {"input": "Tell me a story.", "ignore_eos": True, "max_output_tokens": 1800, "store": False}
    frame = {"type": "response.create", "stream_id": f"s{stream}", **fields, "unknown": "a" * _FRAME_BYTES}
    return json.dumps(frame).encode()


ATTACK = Attack("websocket-frames", "176 response.create of 1 MB on one WebSocket, again and again", run)
