"""`chatcache serve` with a fake model.

Usage: `python -m tests.cli.drained_server DB DRAIN_TIMEOUT_S [broken]`.
"""

from __future__ import annotations

import sys

from chatcache.cli.server import run_server
from chatcache.config import EngineConfig, ServerConfig
from chatcache.engine.engine import Engine
from chatcache.gateway.context import Gateway
from tests.gateway.serving import MAX_MODEL_LEN, tiny_tokenizer
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

STEP_S = 0.02


def build_engine(config: EngineConfig, progress: object) -> Engine:
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_ids
    capacity = fake_capacity(4096, 4, max_model_len=MAX_MODEL_LEN)
    runner = FakeRunner(capacity, tokenizer.vocab_size, eos[0], eos_every=0, delay_s=STEP_S)
    model_info = fake_model_info(tokenizer.vocab_size, eos, MAX_MODEL_LEN)
    return Engine(runner, model_info, config, tokenizer.token_bytes, special_ids=tokenizer.special_ids)


async def _do_nothing(*_: object) -> None:
    return None


def main(db: str, drain_timeout_s: float, *, is_broken: bool) -> int:
    """Run the server; `is_broken` injects a bug: a drain interrupts no running answer."""
    if is_broken:
        Gateway.interrupt = _do_nothing  # type: ignore[method-assign, assignment]
    server = ServerConfig(port=0, db=db, drain_timeout_s=drain_timeout_s, sse_keep_alive_interval_s=0)
    config = EngineConfig(served_model_name="hash")
    return run_server(
        config, server, build_engine="tests.cli.drained_server:build_engine", load=lambda _: tiny_tokenizer()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), is_broken="broken" in sys.argv))
