"""The gateway's benchmark: what it reads out of bytes, and a small run of the whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from loadtest.gateway import __main__ as benchmark
from loadtest.gateway.figures import Arrivals, latencies_ms, volume
from loadtest.gateway.ticks import NUM_TICKS, tick_text
from loadtest.gateway.wires import WIRES

pytestmark = pytest.mark.linux  # reads /proc and pins processes to cores


def arrivals(ticks: list[int], seed: int) -> tuple[Arrivals, list[int]]:
    """A stream cut into pieces anywhere; piece k is read at k milliseconds. Also: when each token was whole."""
    rng = random.Random(seed)
    data, ends = b"", []
    for tick in ticks:
        data += f'data: {{"delta":"{tick_text(tick)}"}}\n\n'.encode()
        ends.append(data.index(tick_text(tick).encode()) + len(tick_text(tick)))
    cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, 40)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole = [next(k for k in range(len(pieces)) if len(b"".join(pieces[: k + 1])) >= end) for end in ends]
    return Arrivals(pieces, [k * 1_000_000 for k in range(len(pieces))]), whole


@pytest.mark.parametrize("seed", range(20))
def test_a_token_has_arrived_when_its_last_byte_has(seed: int) -> None:
    ticks = sorted(random.Random(seed).sample(range(NUM_TICKS), 12))
    stream, whole = arrivals(ticks, seed)
    found, at_ns = stream.tokens()
    assert found.tolist() == ticks
    assert (at_ns // 1_000_000).tolist() == whole
    emitted = np.zeros(NUM_TICKS, np.int64)
    emitted[ticks] = 250_000
    end_ns = len(stream.pieces) * 1_000_000
    assert latencies_ms([stream], emitted, 0, end_ns).tolist() == [k - 0.25 for k in whole]
    assert volume([stream], 0, end_ns) == (len(stream.pieces), sum(map(len, stream.pieces)))


def test_a_repeated_token_is_noticed() -> None:
    stream, _ = arrivals([1, 2, 2, 3], 0)
    with pytest.raises(ValueError, match="repeated"):
        latencies_ms([stream], np.zeros(NUM_TICKS, np.int64), 0, 1 << 60)


def test_a_small_run_of_every_wire(tmp_path: Path) -> None:
    arguments = ["--streams", "80", "--window", "0.5", "--settle", "0.1", "--rate", "20", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    (path,) = tmp_path.glob("gateway-*.json")
    document = json.loads(path.read_text())
    runs = {(run["what"], run["wire"]): run for run in document["runs"]}
    assert set(runs) == {(what, wire) for what in ("bare", "gateway") for wire in WIRES}
    for run in runs.values():
        assert run["streams"] == 80 and run["tokens"] > 80
        assert run["cpu_us_per_token"] > 0 and run["latency_ms"]["p50"] > 0
