"""A server or worker that generates endless replies slowly: `python -m tests.e2e.throttled_server serve ...`.

The demo model fills its context in seconds, and a browser on a busy machine may need as long to reload. A test that
acts in the middle of a reply must find the reply still incomplete.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from chatcache import factory as compose
from chatcache.cli import server, worker
from chatcache.cli.main import main as chatcache
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine_process.loop import Progress
from chatcache.types.events import EngineEvent
from chatcache.types.request import GenerateRequest

ENDLESS_TOKENS = 1000  # `max_output_tokens` from which a request counts as endless; None: all the context has left
STEP_S = 0.04


class ThrottledEngine:
    """An engine whose steps take at least `STEP_S` while an endless request runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._endless: set[str] = set()

    def add(self, request: GenerateRequest) -> None:
        self._engine.add(request)
        params = request.params
        if params.ignore_eos and (params.max_tokens is None or params.max_tokens >= ENDLESS_TOKENS):
            self._endless.add(request.request_id)

    def step(self) -> Sequence[EngineEvent]:
        self._endless &= self._engine._requests.keys()
        if self._endless:
            time.sleep(STEP_S)
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def build_engine(config: EngineConfig, progress: Progress | None = None) -> ThrottledEngine:
    """Build the engine of the CLI, throttled."""
    return ThrottledEngine(compose.build_engine(config, progress))


if __name__ == "__main__":
    throttled = "tests.e2e.throttled_server:build_engine"
    server.run_server = functools.partial(server.run_server, build_engine=throttled)
    worker.run_worker = functools.partial(worker.run_worker, build_engine=throttled)
    chatcache()
