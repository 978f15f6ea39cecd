"""Beam search token- and score-exact with `transformers` on a random fp32 Llama."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chatcache.decode.factory import make_strategy
from chatcache.sched.plan import F32
from chatcache.types import BeamSearchParams, GenerateRequest, ModelFacts
from tests.decode.decode_driver import Outcome, run

VOCAB_SIZE = 48
MAX_TOKENS = 10
PROMPTS = ((1, 17, 30, 4), (9, 9, 2, 40, 11, 23))


class TinyLlama:
    """A model whose logits are sharp enough for EOS to win now and then."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.35,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.model = LlamaForCausalLM(config).float().eval()
        self._known: dict[tuple[int, ...], F32] = {}

    def __call__(self, tokens: tuple[int, ...]) -> F32:
        if tokens not in self._known:
            with torch.no_grad():
                logits: F32 = self.model(torch.tensor([tokens])).logits[0, -1].numpy()
            self._known[tokens] = logits
        return self._known[tokens]


@pytest.fixture(scope="module")
def llama() -> TinyLlama:
    return TinyLlama()


def theirs(
    llama: TinyLlama, prompt: tuple[int, ...], params: BeamSearchParams, eos: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    got = llama.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.n or params.beam_width,
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(eos),
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = []
    for sequence, score in zip(got.sequences.tolist(), got.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        length = next((k + 1 for k, token in enumerate(output) if token in eos), len(output))
        rows.append((output[:length], score))
    return rows


def ours(llama: TinyLlama, prompt: tuple[int, ...], params: BeamSearchParams, eos: tuple[int, ...]) -> list[Outcome]:
    facts = ModelFacts(name="tiny", digest="00", vocab_size=VOCAB_SIZE, max_model_len=128, eos_token_ids=eos)
    request = GenerateRequest(request_id="r", prompt=prompt, params=params)
    strategy = make_strategy(request, facts, seed=0, max_tokens=MAX_TOKENS, token_bytes=None)
    return list(run(strategy, prompt, llama).outcomes.values())


def agree(llama: TinyLlama, params: BeamSearchParams, eos: tuple[int, ...]) -> set[str]:
    reasons = set()
    for prompt in PROMPTS:
        want, got = theirs(llama, prompt, params, eos), ours(llama, prompt, params, eos)
        assert [outcome.tokens for outcome in got] == [tokens for tokens, _ in want]
        for outcome, (_, score) in zip(got, want, strict=True):
            assert outcome.done is not None
            assert outcome.done.score == pytest.approx(score, rel=1e-5, abs=1e-5)
            reasons.add(outcome.done.finish_reason)
    return reasons


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", range(2, 9))
def test_equals_generate(llama: TinyLlama, width: int, early_stopping: bool | str) -> None:
    reasons = set()
    for length_penalty in (1.0, (-0.5, 0.0, 1.7)[width % 3]):
        params = BeamSearchParams(beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        reasons |= agree(llama, params, eos=(5, 21))
    assert width < 4 or "stop" in reasons  # EOS was reached, so the finished set was exercised


@pytest.mark.parametrize("eos", [(5,), (5, 21, 33, 40)])
def test_equals_generate_for_the_best_n(llama: TinyLlama, eos: tuple[int, ...]) -> None:
    agree(llama, BeamSearchParams(beam_width=5, n=2), eos)


def test_equals_generate_with_min_tokens(llama: TinyLlama) -> None:
    for early_stopping in (True, False):
        agree(llama, BeamSearchParams(beam_width=4, min_tokens=5, early_stopping=early_stopping), eos=(5, 21))


def test_width_one_that_stops_early_is_greedy(llama: TinyLlama) -> None:
    for prompt in PROMPTS:
        greedy = llama.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            eos_token_id=[5, 21],
            pad_token_id=0,
            do_sample=False,
        )[0].tolist()[len(prompt) :]
        (outcome,) = ours(llama, prompt, BeamSearchParams(beam_width=1, early_stopping=True), (5, 21))
        assert outcome.tokens == greedy
