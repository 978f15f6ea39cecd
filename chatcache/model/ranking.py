"""The largest of each row, equal values by ascending id: one order for every draw, whatever the device."""

from __future__ import annotations

import torch
from torch import Tensor


def top_tokens(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest of each row and their ids, best first, equal values by ascending id.

    Shapes: values [N, V] float32 -> [N, size] each. One more is fetched than asked: if it equals the last, `topk`
    chose among equals as it liked, and those rows are done again over unique integer keys.
    """
    vocab_size = values.shape[-1]
    found, ids = values.topk(min(size + 1, vocab_size))
    if found.shape[-1] > size:
        tied = (found[:, size] == found[:, size - 1]).nonzero().squeeze(-1)
        found, ids = found[:, :size], ids[:, :size]
        if tied.numel():
            ids[tied] = _ordered_keys(values[tied]).topk(size).indices
            found = values.gather(-1, ids)
    ids, order = ids.sort(-1)
    found, again = found.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return found, ids.gather(-1, again)


def _ordered_keys(values: Tensor) -> Tensor:
    """Return int64 keys that sort like (value, -id): float32 bits made monotone, above the reversed id."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    monotone = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    reverse = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (monotone << 32) | reverse
