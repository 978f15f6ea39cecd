"""Change single draws' logits before anything is drawn: penalties, biases, bans, and the masks of constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.transfer import to_device
from chatcache.sched.plan import LogitEdit, LogitMask

WORD_BITS = 32


def apply_edits(logits: Tensor, edits: Sequence[LogitEdit]) -> None:
    """Apply every edit, in place. Shapes: logits [D, V] float32, one row per draw."""
    if not edits:
        return
    draw = np.concatenate([np.full(len(edit.ids), edit.draw, np.int64) for edit in edits])
    ids = np.concatenate([edit.ids.astype(np.int64) for edit in edits])
    scale, add = np.concatenate([edit.scale for edit in edits]), np.concatenate([edit.add for edit in edits])
    known = (ids >= 0) & (ids < logits.shape[-1])  # an EOS id of the tokenizer may lie beyond the model's logits
    if not known.all():
        draw, ids, scale, add = draw[known], ids[known], scale[known], add[known]

    def put(array: NDArray[Any]) -> Tensor:
        return to_device(array, logits.device)

    at = put(draw), put(ids)
    old, by = logits[at], put(scale)
    logits[at] = torch.where(old > 0, old / by, old * by) + put(add)


def apply_masks(logits: Tensor, masks: Sequence[LogitMask]) -> None:
    """Set all that the masks do not allow to -inf, in place. Shapes: logits [D, V] float32, one row per draw."""
    if not masks:
        return
    words = np.zeros((len(masks), -(-logits.shape[-1] // WORD_BITS)), np.uint32)
    for row, mask in enumerate(masks):
        size = min(len(mask.words), words.shape[1])
        words[row, :size] = mask.words[:size]
    forbidden = _forbidden(words, logits.shape[-1], logits.device)
    draws = [mask.draw for mask in masks]
    if draws == list(range(len(logits))):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        at = to_device(np.array(draws, np.int64), logits.device)
        logits[at] = logits[at].masked_fill_(forbidden, -torch.inf)


def _forbidden(words: NDArray[np.uint32], vocab_size: int, device: torch.device) -> Tensor:
    """Spread the bits that are not set over a vocabulary. Shapes: [M, W] -> bool [M, V]. Only words go to a device."""
    eights = (~words).astype("<u4").view(np.uint8)
    if device.type == "cpu":
        flags = np.unpackbits(eights, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    bits = to_device(eights, device)[:, :, None].bitwise_and(2 ** torch.arange(8, dtype=torch.uint8, device=device))
    return bits.view(len(words), -1)[:, :vocab_size] != 0
