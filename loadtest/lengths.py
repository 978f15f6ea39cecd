"""Prompt and output lengths of requests: the ShareGPT and Alpaca distributions of the vLLM paper, or a file.

The paper (Kwon et al., SOSP 2023, arXiv 2309.06180, section 6.1) publishes the mean lengths only. The spread of the
gamma distributions here is an assumption: it was chosen so that the simulated memory use and batch sizes of the paper's
Figures 2 and 13 match the published ones.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MAX_TOTAL_TOKENS = 2048  # context length of the paper's models; longer requests are left out, as in the paper

PROMPT_COLUMNS = ("prompt_tokens", "num_prompt_tokens", "input_length", "contexttokens", "prompt", "input")
OUTPUT_COLUMNS = ("output_tokens", "num_output_tokens", "output_length", "generatedtokens", "output")


class RequestLengths(NamedTuple):
    """Numbers of tokens of one request."""

    prompt: int
    output: int


class LengthDistribution(Protocol):
    """Lengths of requests, drawn with a given source of randomness."""

    def sample(self, rng: random.Random) -> RequestLengths: ...


@dataclass(frozen=True, slots=True)
class GammaLengths:
    """Independent gamma distributions of both lengths, at least 1 token each.

    `*_mean`: in tokens. `*_cv`: coefficient of variation (standard deviation / mean). Both before requests of
    `max_total` tokens or more are left out, which lowers them.
    """

    prompt_mean: float
    prompt_cv: float
    output_mean: float
    output_cv: float
    max_total: int = MAX_TOTAL_TOKENS

    def sample(self, rng: random.Random) -> RequestLengths:
        while True:
            prompt = _gamma(rng, self.prompt_mean, self.prompt_cv)
            output = _gamma(rng, self.output_mean, self.output_cv)
            if prompt + output < self.max_total:
                return RequestLengths(prompt, output)


def _gamma(rng: random.Random, mean: float, cv: float) -> int:
    shape = 1 / cv**2
    return max(1, round(rng.gammavariate(shape, mean / shape)))


@dataclass(frozen=True, slots=True)
class ListedLengths:
    """Lengths of recorded requests, drawn uniformly."""

    requests: Sequence[RequestLengths]

    def sample(self, rng: random.Random) -> RequestLengths:
        return rng.choice(self.requests)


SHAREGPT = GammaLengths(180.4, 1.86, 342.4, 0.84)  # means 161.31 and 337.99 with the limit
ALPACA = GammaLengths(19.31, 0.9, 58.45, 1.04)
NAMED: Mapping[str, LengthDistribution] = {"sharegpt": SHAREGPT, "alpaca": ALPACA}


def open_lengths(name: str) -> LengthDistribution:
    """Return the distribution of that name, or the lengths in the file of that name.

    Raises: ValueError for a file without lengths, OSError for a file that cannot be read.
    """
    return NAMED[name] if name in NAMED else ListedLengths(read_lengths(Path(name)))


def read_lengths(path: Path) -> list[RequestLengths]:
    """Read the lengths in a file: JSON lines, or CSV with or without a header.

    Columns are found by name (PROMPT_COLUMNS, OUTPUT_COLUMNS, any case); without a header they are prompt, output.
    Requests without prompt or output tokens are left out. Raises: ValueError for a file without lengths.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows: list[Mapping[str, Any]]
        if path.suffix in (".jsonl", ".json"):
            rows = [json.loads(line) for line in file if line.strip()]
        else:
            rows = _read_csv(file.read().splitlines())
    try:
        found = [RequestLengths(_column(row, PROMPT_COLUMNS), _column(row, OUTPUT_COLUMNS)) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a request without prompt and output length ({error})") from None
    found = [lengths for lengths in found if min(lengths) > 0]
    if not found:
        raise ValueError(f"{path}: contains no request lengths")
    return found


def _read_csv(lines: Sequence[str]) -> list[Mapping[str, Any]]:
    first = next(csv.reader(lines[:1]), [])
    is_header = any(not cell.strip().isdigit() for cell in first)
    return list(csv.DictReader(lines, None if is_header else ("prompt", "output")))


def _column(row: Mapping[str, Any], names: Sequence[str]) -> int:
    lower = {key.strip().lower(): value for key, value in row.items() if key is not None}
    return int(lower[next((name for name in names if name in lower), names[0])])
