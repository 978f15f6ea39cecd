"""`python -m loadtest.bus`: what the way over Redis costs, compared with an engine behind a pipe.

Both engines are the demo model in a process of its own. One is used through the pipe of `chatcache serve`, the other
through a worker on the bus. The rounds of both alternate, so that a busy machine delays both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from chatcache.cluster import bus
from chatcache.cluster.remote_engine import RemoteEngine
from chatcache.cluster.worker_host import WorkerHost
from chatcache.config import EngineConfig
from chatcache.engine.protocols import EngineClient
from chatcache.engine_process.process import EngineProcess
from chatcache.factory import BUILD_ENGINE
from chatcache.types.events import Tokens
from chatcache.types.request import GenerateRequest, SamplingParams

NUM_PROMPT_TOKENS = 32
CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one engine: median time to first token of single requests, and tokens per second of concurrent ones."""

    ttft_ms: float
    tokens_per_s: float
    num_tokens: int


async def measure(engine: EngineClient, name: str, num_requests: int, num_streams: int, num_tokens: int) -> Figures:
    """Send requests one after another, then streams at once."""
    waits_s = [await _first_token_s(engine, _request(f"{name}-{number}", 2)) for number in range(num_requests)]
    started_s = time.perf_counter()
    streams = [_count(engine, _request(f"{name}-stream-{number}", num_tokens)) for number in range(num_streams)]
    counts = await asyncio.gather(*streams)
    rate = sum(counts) / (time.perf_counter() - started_s)
    return Figures(1000 * statistics.median(waits_s), rate, sum(counts))


def _request(name: str, max_tokens: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return GenerateRequest(request_id=name, prompt=tuple(range(1, 1 + NUM_PROMPT_TOKENS)), params=params)


async def _first_token_s(engine: EngineClient, request: GenerateRequest) -> float:
    started_s, first_s = time.perf_counter(), 0.0
    await engine.submit(request)
    async for event in engine.events(request.request_id):
        if isinstance(event, Tokens) and not first_s:
            first_s = time.perf_counter() - started_s
    return first_s


async def _count(engine: EngineClient, request: GenerateRequest) -> int:
    await engine.submit(request)
    events = [event async for event in engine.events(request.request_id)]
    return sum(len(event.token_ids) for event in events if isinstance(event, Tokens))


async def compare(url: str, num_rounds: int, num_requests: int, num_streams: int, num_tokens: int) -> None:
    """Print the figures of each round. Raises: redis.RedisError or OSError without a Redis at `url`."""
    client = bus.connect(url)
    await client.ping()
    await client.aclose()
    config = EngineConfig(  # without a kernel to compile
        kv_memory_bytes=64 << 20, max_num_seqs=num_streams, attention_backend="reference", dtype="float32"
    )
    piped, hosted = (EngineProcess(config, BUILD_ENGINE, log_level="error") for _ in range(2))
    async with piped, hosted:
        await asyncio.gather(piped.wait_loaded(), hosted.wait_loaded())
        hosting = asyncio.create_task(WorkerHost(hosted, url, "loadtest", "loadtest").run())
        async with RemoteEngine(url, "loadtest") as remote:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await remote.wait_loaded()
            for number in range(num_rounds):
                sizes = (num_requests, num_streams, num_tokens)
                pipe = await measure(piped, f"pipe{number}", *sizes)
                over_bus = await measure(remote, f"bus{number}", *sizes)
                print(
                    f"time to first token: pipe {pipe.ttft_ms:.2f} ms, bus {over_bus.ttft_ms:.2f} ms, "
                    f"difference {over_bus.ttft_ms - pipe.ttft_ms:+.2f} ms; "
                    f"tokens/s: pipe {pipe.tokens_per_s:.0f}, bus {over_bus.tokens_per_s:.0f}, "
                    f"ratio {over_bus.tokens_per_s / pipe.tokens_per_s:.2f}; {over_bus.num_tokens} tokens each",
                    flush=True,
                )
        hosting.cancel()
        await asyncio.gather(hosting, return_exceptions=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 2 if no Redis answers."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bus", description=__doc__)
    parser.add_argument("--bus", default="redis://127.0.0.1:6379/0", help="URL of a Redis without other workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="one after another, for the time to first token")
    parser.add_argument("--streams", type=int, default=64, help="at once, for the tokens per second")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    args = parser.parse_args(argv)
    try:
        asyncio.run(compare(args.bus, args.rounds, args.requests, args.streams, args.tokens))
    except (redis.RedisError, OSError) as error:
        print(f"no Redis answers at --bus: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
