"""Send one streamed chat turn and time it as the client sees it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Turn:
    """Times and token counts of one turn.

    `gaps_s`: seconds between consecutive streamed texts (ITL).
    """

    user: int
    turn: int
    started_s: float
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first: (total - TTFT) / (tokens - 1)."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.completion_tokens - 1)


async def stream_turn(http: httpx.AsyncClient, body: dict[str, Any], turn: Turn) -> Turn:
    """Send one request and fill `turn`, which also records a failure; nothing is raised."""
    start = last = time.perf_counter()
    pieces: list[str] = []
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                turn.error = f"HTTP {response.status_code}: {response.text[:200]}"
                return turn
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    turn.error = str(chunk["error"].get("message"))
                    return turn
                _record_usage(turn, chunk.get("usage"))
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if text:
                    now = time.perf_counter()
                    if turn.ttft_s is None:
                        turn.ttft_s = now - start
                    else:
                        turn.gaps_s.append(now - last)
                    last = now
                    pieces.append(text)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        turn.error = f"{type(error).__name__}: {error}"
    finally:
        turn.total_s = time.perf_counter() - start
        turn.text = "".join(pieces)
    return turn


def _record_usage(turn: Turn, usage: dict[str, Any] | None) -> None:
    if not usage:
        return
    turn.prompt_tokens = usage["prompt_tokens"]
    turn.completion_tokens = usage["completion_tokens"]
    turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
