"""The banner's rows, from made-up figures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from chatcache.cli.banner import Banner
from chatcache.config import EngineConfig, ServerConfig
from chatcache.types import EngineHealth, ModelFacts

FACTS = ModelFacts(name="m", digest="00", vocab_size=10, max_model_len=2048, dtype="float32", attention="cpu")
HEALTH = EngineHealth(ready=True, page_size=16, num_pages=127, kv_bytes=128 * 4096, num_host_pages=256)


def shown(engine: EngineConfig, server: ServerConfig, health: EngineHealth = HEALTH) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    Banner(engine, server, ("127.0.0.1", 1), console).show_ready(FACTS, health)
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (EngineConfig(), "127 pages of 16 tokens, 4 KiB each, 512 KiB in all"),
        (EngineConfig(), "waste up to 15 unused tokens in a branch's last page"),
        # 2 MiB asked for, 127 pages hold tokens: 1.504 MiB do not
        (EngineConfig(kv_memory_bytes=2**21), "waste 1.504 MiB of the memory hold no page (75.2%); up to 15 unused"),
        (EngineConfig(), "swap 256 host pages, 1 MiB"),
        (EngineConfig(), "float32 on cpu, cpu attention context"),
        (EngineConfig(deterministic=True), "float32 on cpu, cpu attention, deterministic"),
    ],
)
def test_rows(engine: EngineConfig, text: str) -> None:
    if text.endswith("context"):
        text = text.removesuffix(" context")
        assert f"{text}, deterministic" not in shown(engine, ServerConfig())
    assert text in shown(engine, ServerConfig())


def test_what_is_not_there_has_no_row() -> None:
    text = shown(EngineConfig(), ServerConfig(), EngineHealth(ready=True, page_size=16, num_pages=127, kv_bytes=2**19))
    assert "host pages" not in text and "public" not in text
    assert "2 system prompt(s)" in shown(EngineConfig(), ServerConfig(public_prompts=("a", "b")))
