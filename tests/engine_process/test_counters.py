"""Engine counters reach the gateway's metrics, from a thread and from a child process."""

from __future__ import annotations

import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chatcache.engine_process.process import EngineProcess
from chatcache.gateway.metrics import Metrics
from chatcache.types.events import Finished
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import EngineHealth
from tests.engine_process.engines import build_small, until
from tests.engine_process.test_engine import Client, driven

pytestmark = pytest.mark.slow

NUM_PLAIN = 12


def sample(health: EngineHealth) -> dict[str, float]:
    """Return samples of the exposition by name and label value."""
    families = text_string_to_metric_families(Metrics().render(health).decode())
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            values = ",".join(value for label, value in sample.labels.items() if label != "le")
            if "le" not in sample.labels:
                found[f"{sample.name}{{{values}}}" if values else sample.name] = sample.value
    return found


async def finish(client: Client, name: str, prompt: tuple[int, ...], params: Params) -> None:
    await client.submit(GenerateRequest(request_id=name, prompt=prompt, params=params))
    events = [event async for event in client.events(name)]
    assert isinstance(events[-1], Finished)


async def work(client: Client) -> None:
    for number in range(NUM_PLAIN):
        prompt = tuple((number * 13 + place * 7) % 64 for place in range(60))
        await finish(client, f"r{number}", prompt, SamplingParams(max_tokens=4))
    await finish(client, "four", (1, 2, 3), SamplingParams(max_tokens=4, n=4))
    await finish(client, "beams", (1, 2, 3), BeamSearchParams(beam_width=3, max_tokens=8))


@pytest.mark.parametrize("how", ["thread", "process"])
async def test_counters_of_the_engine_reach_the_gateway_metrics(how: str) -> None:
    async with driven(how, build_small) as client:
        await work(client)
        num_requests = NUM_PLAIN + 2

        async def is_reported() -> bool:
            return sum((await client.health()).decode.counts) == num_requests

        await until(is_reported, 60)
        values = sample(await client.health())
        for name in ("queue", "prefill", "decode"):
            assert values[f"chatcache_{name}_seconds_count"] == num_requests
            assert values[f"chatcache_{name}_seconds_sum"] > 0
        assert values["chatcache_forks_total{n}"] == 3
        assert values["chatcache_forks_total{beam}"] >= 2
        assert values["chatcache_kv_evictions_total"] > 0
        assert values["chatcache_engine_restarts_total"] == 0
        if isinstance(client, EngineProcess):
            await crashed_once(client)


async def crashed_once(client: EngineProcess) -> None:
    """Check that counters start again and the restart is counted."""
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)

    async def is_back() -> bool:
        health = await client.health()
        return health.ready and health.num_restarts == 1

    await until(is_back, 60)
    assert sample(await client.health())["chatcache_queue_seconds_count"] == 0
