"""`python -m loadtest.gateway`: the evaluation of received bytes, and a small complete run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from loadtest.gateway import __main__ as benchmark
from loadtest.gateway.clients import TRANSPORTS, Arrivals, count_reads, latencies_ms
from loadtest.gateway.ticks import NUM_TICKS, tick_text

pytestmark = pytest.mark.linux  # reads /proc and pins processes to cores


def arrivals(ticks: list[int], seed: int) -> tuple[Arrivals, list[int]]:
    """Return a stream cut at random, read one piece per ms, and each token's last piece."""
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
def test_arrivals_tokens_arrive_with_their_last_byte(seed: int) -> None:
    ticks = sorted(random.Random(seed).sample(range(NUM_TICKS), 12))
    stream, whole = arrivals(ticks, seed)
    found, at_ns = stream.tokens()
    assert found.tolist() == ticks
    assert (at_ns // 1_000_000).tolist() == whole
    emitted = np.zeros(NUM_TICKS, np.int64)
    emitted[ticks] = 250_000
    end_ns = len(stream.pieces) * 1_000_000
    assert latencies_ms([stream], emitted, 0, end_ns).tolist() == [k - 0.25 for k in whole]
    assert count_reads([stream], 0, end_ns) == (len(stream.pieces), sum(map(len, stream.pieces)))


def test_latencies_with_repeated_token_raise() -> None:
    stream, _ = arrivals([1, 2, 2, 3], 0)
    with pytest.raises(ValueError, match="repeated"):
        latencies_ms([stream], np.zeros(NUM_TICKS, np.int64), 0, 1 << 60)


@pytest.mark.parametrize("transports", [["chat"], pytest.param([*TRANSPORTS], marks=pytest.mark.slow)], ids=len)
@pytest.mark.slow
def test_main_measures_transports(transports: list[str], tmp_path: Path) -> None:
    arguments = ["--streams", "80", "--window", "0.5", "--settle", "0.1", "--rate", "20", "--out", str(tmp_path)]
    assert benchmark.main([*arguments, "--transports", *transports]) == 0
    (path,) = tmp_path.glob("gateway-*.json")
    document = json.loads(path.read_text())
    runs = {(run["server"], run["transport"]): run for run in document["runs"]}
    assert set(runs) == {(server, transport) for server in ("bare", "gateway") for transport in transports}
    for run in runs.values():
        assert run["streams"] == 80 and run["tokens"] > 80
        assert run["cpu_us_per_token"] > 0 and run["latency_ms"]["p50"] > 0


def test_runs_table_shows_median_runs_and_the_ratio_to_bare() -> None:
    committed = Path(benchmark.RESULTS / "gateway-20261121-041558.json")
    rows = benchmark.runs_table(json.loads(committed.read_text())["runs"]).splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [
        [name, server] for name in TRANSPORTS for server in ("bare", "gateway")
    ]
    assert [row.split()[4] == "1.00" for row in rows[1:]] == [True, False] * len(TRANSPORTS)
