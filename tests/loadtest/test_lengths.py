"""Length distributions of requests: published means, the limit on their sum, and files."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from loadtest.lengths import ALPACA, SHAREGPT, GammaLengths, RequestLengths, open_lengths, read_lengths


@pytest.mark.parametrize(("lengths", "prompt", "output"), [(SHAREGPT, 161.31, 337.99), (ALPACA, 19.31, 58.45)])
def test_named_lengths_have_the_published_means(lengths: GammaLengths, prompt: float, output: float) -> None:
    rng = random.Random(1)
    sampled = [lengths.sample(rng) for _ in range(20_000)]
    assert statistics.mean(each.prompt for each in sampled) == pytest.approx(prompt, rel=0.04)
    assert statistics.mean(each.output for each in sampled) == pytest.approx(output, rel=0.04)
    assert max(each.prompt + each.output for each in sampled) < 2048 and min(map(min, sampled)) >= 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.csv", "5,7\n11,13\n"),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,7\n2023-11-16,11,13\n"),
        ("mooncake.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 7}\n'
                           '{"timestamp": 9, "input_length": 11, "output_length": 13}\n'),
    ],
)  # fmt: skip
def test_read_lengths_file_formats_return_the_requests(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_lengths(path) == [RequestLengths(5, 7), RequestLengths(11, 13)]
    assert open_lengths(str(path)).sample(random.Random(0)) in read_lengths(path)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "prompt,output\n0,4\n"])
def test_read_lengths_file_without_lengths_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.csv"):
        read_lengths(path)
