"""`top_tokens` equals Python's sort on values with many ties."""

from __future__ import annotations

import pytest
import torch

from chatcache.model.sampling.ops import top_tokens


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 2003])
@pytest.mark.parametrize("levels", [1, 3, 40, 10**6])
def test_top_tokens_ranks_equal_values_by_ascending_id(vocab_size: int, levels: int) -> None:
    values = torch.randint(-levels, levels + 1, (25, vocab_size)).float()
    values[:5] = torch.randint(-1, 1, (5, vocab_size)) * 0.0  # zeros of both signs
    values[5:8].masked_fill_(torch.rand(3, vocab_size) < 0.97, -torch.inf)
    for size in {1, 2, 20, 100, vocab_size - 1, vocab_size}:
        if not 0 < size <= vocab_size:
            continue
        found, ids = top_tokens(values, size)
        for row, (values_found, ids_found) in enumerate(zip(found.tolist(), ids.tolist(), strict=True)):
            pairs = sorted((-value, place) for place, value in enumerate(values[row].tolist()))[:size]
            assert ids_found == [place for _, place in pairs]
            assert values_found == [-value for value, _ in pairs]


def test_top_tokens_with_nan_rows_leaves_other_rows_unchanged() -> None:
    values = torch.randint(0, 9, (6, 500)).float()
    expected = top_tokens(values, 40)
    broken = values.clone()
    broken[2], broken[4, ::3], broken[5, 7] = torch.nan, torch.nan, torch.nan
    found, ids = top_tokens(broken, 40)
    for row in (0, 1, 3):
        assert torch.equal(found[row], expected[0][row])
        assert torch.equal(ids[row], expected[1][row])
    assert ids.min() >= 0
    assert ids.max() < 500
