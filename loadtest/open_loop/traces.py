"""Recorded requests: the Azure LLM inference trace (CSV) and block-hash traces in Mooncake's format (JSON lines).

Azure's columns are TIMESTAMP, ContextTokens and GeneratedTokens. A line of a block-hash trace has `timestamp`
(milliseconds), `input_length`, `output_length`, and `hash_ids`: one id for each 512 tokens of the prompt. Two prompts
with the same id at the same place have the same tokens up to the end of that block. Lines with the same `session_id`
are the turns of one conversation: from the second on they have a `delay` (milliseconds after the previous reply)
instead of a timestamp, and their `input_length` counts the new tokens only.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512  # of Mooncake's traces


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    `at_s`: seconds after the first request of the trace; unused in later turns. `block_ids`: content of the prompt, in
    blocks of BLOCK_TOKENS tokens; empty if unknown. `session`: conversation of the request, or "". `think_s`: pause
    after the previous turn.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    session: str = ""
    think_s: float = 0.0


def read_trace(path: Path) -> list[list[TraceRequest]]:
    """Read a trace as conversations, in order of their first requests; most have a single one.

    Requests without prompt or output tokens are left out. Raises: ValueError for a file in neither format, OSError for
    a file that cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                requests = [_from_azure(row) for row in csv.DictReader(file)]
            else:
                requests = [_from_blocks(json.loads(line)) for line in file if line.strip()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a trace ({type(error).__name__}: {error})") from None
    conversations: dict[str | int, list[TraceRequest]] = {}
    for number, request in enumerate(requests):
        if request.num_prompt_tokens > 0 and request.num_output_tokens > 0:
            conversations.setdefault(request.session or number, []).append(request)
    if not conversations:
        raise ValueError(f"{path}: contains no requests")
    ordered = sorted(conversations.values(), key=lambda turns: turns[0].at_s)
    first_s = ordered[0][0].at_s
    return [[replace(turns[0], at_s=turns[0].at_s - first_s), *turns[1:]] for turns in ordered]


def _from_azure(row: dict[str, str]) -> TraceRequest:
    whole, _, fraction = row["TIMESTAMP"].partition(".")  # the fraction has seven digits, datetime takes six
    at_s = (datetime.fromisoformat(whole) - datetime(2023, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
    return TraceRequest(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _from_blocks(row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        float(row.get("timestamp", 0)) / 1e3,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(row.get("hash_ids", ())),
        str(row.get("session_id", "")),
        float(row.get("delay", 0)) / 1e3,
    )
