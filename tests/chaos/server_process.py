"""A gateway, a worker, or a gateway with its own engine process, with an adjustable wall clock.

Run as `python -m tests.chaos.server_process gateway STORE PORT [BUS]` or `... worker NAME BUS READY_FILE`. If
CHAOS_CLOCK names a file, the wall clock is shifted by the number of seconds in that file. (libfaketime 0.9.10 could do
that from outside, but with it every `time.sleep` of Python 3.11 fails with EINVAL.)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from chatcache.cli.server import run_server
from chatcache.cli.worker import run_worker
from chatcache.config import EngineConfig, ServerConfig
from tests.chaos.tagged_model import MAX_MODEL_LEN, load_tokenizer

CLOCK = "CHAOS_CLOCK"
ENGINE = "tests.chaos.tagged_model:build_engine"


def bend_clock(path: Path) -> None:
    """Shift this process's wall clock by the seconds in the file; monotonic clocks are unchanged."""
    real_ns = time.time_ns
    seen = (0, 0)

    def off_ns() -> int:
        nonlocal seen
        changed_ns = path.stat().st_mtime_ns
        if changed_ns != seen[0]:
            seen = changed_ns, int(float(path.read_text() or "0") * 1e9)
        return seen[1]

    time.time_ns = lambda: real_ns() + off_ns()
    time.time = lambda: time.time_ns() / 1e9


def server_config(store: str, port: int) -> ServerConfig:
    db, redis = ("", store) if "://" in store else (store, "")
    return ServerConfig(
        port=port, log_level="warning", disconnect_grace_period_s=5.0, sse_keep_alive_interval_s=2.0, db=db, redis=redis
    )


def main(kind: str, first: str, second: str, third: str = "") -> int:
    if CLOCK in os.environ:
        bend_clock(Path(os.environ[CLOCK]))
    engine = EngineConfig(model="speaker", served_model_name="speaker", max_model_len=MAX_MODEL_LEN)
    if kind == "worker":
        config = ServerConfig(log_level="warning")
        return run_worker(engine, config, second, first, build_engine=ENGINE, ready_file=Path(third))
    config = server_config(first, int(second))
    return run_server(engine, config, bus_url=third, build_engine=ENGINE, load=load_tokenizer)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
