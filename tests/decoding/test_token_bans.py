"""Bans that depend on the tokens of a branch, against the logits processors of transformers; and masks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.token_bans import TokenBans, TokenMasks
from chatcache.types.plan import F32
from chatcache.types.request import SamplingParams

VOCAB = 6


def after(edits: LogitEdits, logits: F32) -> F32:
    """Apply the edits of a branch to logits."""
    edit = edits.edit(ban=False)
    result = logits.copy()
    if edit is not None:
        ids, scale, add = edit["ids"], edit["scale"], edit["add"]
        assert len(set(ids.tolist())) == len(ids)
        result[ids] = np.where(result[ids] > 0, result[ids] / scale, result[ids] * scale) + add
    return result


def recorded(params: SamplingParams, prompt: list[int], output: list[int]) -> LogitEdits:
    """Return the edits of a branch with this output, forked once on the way from a branch with another one."""
    edits = LogitEdits(params, prompt)
    for token in output[: len(output) // 2]:
        edits.record(token)
    other, edits = edits, edits.fork()
    for token in range(VOCAB):
        other.record(token)
    for token in output[len(output) // 2 :]:
        edits.record(token)
    return edits


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_size_bans_the_tokens_that_transformers_bans(size: int) -> None:
    rng, num_banned = random.Random(size), 0
    for _ in range(60):
        tokens = [rng.randrange(max(VOCAB // size, 2)) for _ in range(rng.randint(1, 40))]
        at = rng.randint(1, len(tokens))
        logits = np.arange(VOCAB, dtype=np.float32)
        params = SamplingParams(no_repeat_ngram_size=size)
        want = NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), torch.tensor(logits)[None])[0].numpy()
        np.testing.assert_array_equal(after(recorded(params, tokens[:at], tokens[at:]), logits), want)
        num_banned += int(np.isneginf(want).sum())
    assert num_banned


def test_bad_words_ban_the_tokens_that_transformers_bans() -> None:
    rng, num_banned = random.Random(3), 0
    for _ in range(60):
        words = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(4)]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
        logits = np.arange(VOCAB, dtype=np.float32)
        params = SamplingParams(bad_words_ids=words, presence_penalty=0.5)  # type: ignore[arg-type]
        processor = NoBadWordsLogitsProcessor(words, eos_token_id=VOCAB + 1)
        penalised = torch.tensor(logits)[None].clone()
        penalised[0, sorted(set(output))] -= 0.5
        # A prompt that ends with the start of a bad word: as in vLLM, only the output counts. Without output,
        # transformers is given a token that occurs in no word.
        want = processor(torch.tensor([[VOCAB, *output]]), penalised)[0].numpy()
        got = after(recorded(params, [word[0] for word in words if len(word) > 1], output), logits)
        np.testing.assert_allclose(got, want)
        num_banned += int(np.isneginf(want).sum())
    assert num_banned


def test_bans_do_not_change_an_edit_that_was_returned() -> None:
    edits = LogitEdits(SamplingParams(no_repeat_ngram_size=1, logit_bias={2: 1.0}), prompt=[1])
    planned = edits.edit(ban=False)
    assert planned is not None
    before = planned.tolist()
    edits.record(2)
    banned = edits.edit(ban=False)
    assert banned is not None and banned.tolist() == [(2, 1.0, -np.inf), (1, 1.0, -np.inf)]
    assert planned.tolist() == before


def test_parameters_without_bans_have_no_state() -> None:
    assert TokenBans(SamplingParams(bad_words_ids=((3,),)), [1, 2]).is_empty
    assert LogitEdits(SamplingParams(bad_words_ids=((3,),)), [1, 2]).is_fixed
    assert not LogitEdits(SamplingParams(bad_words_ids=((3, 4),)), [1, 2]).is_fixed
    assert TokenMasks(SamplingParams(), None).is_empty


def test_allowed_token_ids_are_the_bits_of_the_mask() -> None:
    mask = TokenMasks(SamplingParams(allowed_token_ids=(3, 40)), None).mask(None, 0)
    assert mask is not None
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [3, 40]
