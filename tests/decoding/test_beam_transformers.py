"""Beam search token- and score-exact with `transformers`, through the real engine and model runner.

Random fp32 models of two shapes, every width from 1 to 8. All searches on one model run side by side in one batch, on
small pages that beams cross again and again. Distinct candidates score what transformers makes of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from transformers import LogitsProcessor

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from chatcache.types.events import CandidateDone, Failed, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.model.families import VOCAB, Sample, make_sample

MAX_TOKENS = 20
EOS = (5, 21, 33, 60)
Ranked = list[tuple[list[int], float]]


@dataclass(frozen=True)
class Search:
    prompt: tuple[int, ...]
    params: Params
    eos: tuple[int, ...]


class AddToTokens(LogitsProcessor):  # type: ignore[misc]
    """logit_bias, presence_penalty and frequency_penalty, which generate does not have."""

    def __init__(self, params: BeamSearchParams, num_prompt: int) -> None:
        self._params = params
        self._num_prompt = num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, bias in (self._params.logit_bias or {}).items():
            scores[:, token] += bias
        for row, tokens in enumerate(input_ids[:, self._num_prompt :].tolist()):
            for token, count in Counter(tokens).items():
                scores[row, token] -= self._params.presence_penalty + self._params.frequency_penalty * count
        return scores


@dataclass(frozen=True)
class Shape:
    """One model, on both sides."""

    sample: Sample
    runner: Runner

    def ours(self, searches: list[Search]) -> list[Ranked]:
        """Answer all searches (of one set of EOS ids) side by side."""
        model_info = msgspec.structs.replace(self.runner.model_info, eos_token_ids=searches[0].eos)
        engine = Engine(self.runner, model_info, EngineConfig(page_size=8, max_num_batched_tokens=96))
        for number, search in enumerate(searches):
            engine.add(GenerateRequest(request_id=str(number), prompt=search.prompt, params=search.params))
        tokens: dict[tuple[str, int], list[int]] = {}
        scores: dict[tuple[str, int], float] = {}
        while engine.has_work():
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Tokens):
                    tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
                elif isinstance(event, CandidateDone):
                    scores[event.request_id, event.index] = event.score
        assert engine.health().num_page_copies > 0
        keys = [sorted(key for key in tokens if key[0] == str(number)) for number in range(len(searches))]
        return [[(tokens[key], scores[key]) for key in candidates] for candidates in keys]

    def theirs(self, search: Search) -> Ranked:
        params, prompt = search.params, torch.tensor([search.prompt])
        assert isinstance(params, BeamSearchParams)
        got = self.sample.oracle.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=params.beam_width,
            num_return_sequences=params.n or params.beam_width,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=params.min_tokens or None,
            length_penalty=params.length_penalty if params.beam_width > 1 else None,
            early_stopping=params.early_stopping if params.beam_width > 1 else None,
            eos_token_id=list(search.eos) or None,
            repetition_penalty=params.repetition_penalty,
            no_repeat_ngram_size=params.no_repeat_ngram_size or None,
            bad_words_ids=[list(ids) for ids in params.bad_words_ids] or None,
            logits_processor=[AddToTokens(params, prompt.shape[1])],
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        outputs = [_cut(row[prompt.shape[1] :], search.eos) for row in got.sequences.tolist()]
        if params.beam_width > 1:
            return list(zip(outputs, got.sequences_scores.tolist(), strict=True))
        chosen = [logits[0].log_softmax(-1)[token] for logits, token in zip(got.logits, outputs[0], strict=True)]
        return [(outputs[0], float(sum(chosen)) / len(chosen) ** params.length_penalty)]  # one beam: it is greedy


def _cut(output: list[int], eos: tuple[int, ...]) -> list[int]:
    return output[: next((k + 1 for k, token in enumerate(output) if token in eos), len(output))]


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shape]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    sample = make_sample(request.param, folder)
    config = EngineConfig(
        model=str(folder), dtype="float32", kv_memory_bytes=8 << 20, page_size=8, attention_backend="reference"
    )
    yield Shape(sample, load_model(config))
    torch.set_num_threads(num_threads)


def agree(shape: Shape, searches: list[Search]) -> list[int]:
    """Compare every candidate of every search; return their lengths."""
    answers = shape.ours(searches)
    for search, got in zip(searches, answers, strict=True):
        want = shape.theirs(search)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want], search
        assert [score for _, score in got] == pytest.approx([score for _, score in want], rel=2e-5, abs=2e-5), search
    return [len(tokens) for answer in answers for tokens, _ in answer]


@pytest.mark.slow
def test_every_width_equals_generate(shape: Shape) -> None:
    stops: tuple[bool | str, ...] = (True, False, "never")
    searches = [
        Search(
            shape.sample.prompts[(width + place) % 3],
            BeamSearchParams(
                beam_width=width,
                n=None if width % 3 else 2,
                max_tokens=MAX_TOKENS,
                length_penalty=(1.0, -0.5, 0.0, 1.7)[(width + 3 * place) % 4],
                early_stopping=early_stopping if width > 1 else True,
            ),
            EOS,
        )
        for place, (width, early_stopping) in enumerate(itertools.product(range(1, 9), stops))
    ]
    lengths = agree(shape, searches)
    assert min(lengths) < MAX_TOKENS == max(lengths), "EOS ended some and the length others"


def test_other_ends_equal_generate(shape: Shape) -> None:
    """No EOS; one EOS; min_tokens."""
    for eos, min_tokens in [((), 0), ((60,), 0), (EOS, 7)]:
        params = [BeamSearchParams(beam_width=w, max_tokens=MAX_TOKENS, min_tokens=min_tokens) for w in (2, 5)]
        prompts = shape.sample.prompts[1:3]
        agree(shape, [Search(prompt, param, eos) for prompt, param in zip(prompts, params, strict=True)])


def changed_params(shape: Shape, prompt: tuple[int, ...], width: int) -> list[BeamSearchParams]:
    """Every change of the logits alone and all together; bad words are pairs of tokens of the unchanged outputs."""
    plain = BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS)
    outputs = [tokens for tokens, _ in shape.theirs(Search(prompt, plain, EOS))]
    pairs = {pair for tokens in outputs for pair in itertools.pairwise(tokens) if pair[0] != prompt[-1]}
    words = (*sorted(pairs)[:6], (outputs[0][0],))
    changes: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {outputs[0][1]: -2.0, 40: 1.5, EOS[0]: -1.0},
        "no_repeat_ngram_size": 1,
        "bad_words_ids": words,
    }
    alone = [msgspec.structs.replace(plain, **{name: value}) for name, value in changes.items()]
    together = {**changes, "repetition_penalty": 0.8, "no_repeat_ngram_size": 2}
    return [*alone, msgspec.structs.replace(plain, **together)]


@pytest.mark.parametrize("width", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_penalties_biases_and_bans_equal_generate(shape: Shape, width: int) -> None:
    """Side by side with unchanged searches, token for token and score for score."""
    prompt = shape.sample.prompts[1]
    plain = BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS)
    every = [plain, *changed_params(shape, prompt, width)]
    agree(shape, [Search(prompt, params, EOS) for params in every])
    outputs = [[tokens for tokens, _ in shape.theirs(Search(prompt, params, EOS))] for params in every]
    unchanged = [params for params, got in zip(every[1:], outputs[1:], strict=True) if got == outputs[0]]
    assert not unchanged, "every change matters"


def test_allowed_token_ids_leave_only_these_tokens(shape: Shape) -> None:
    """As transformers with a bias of minus infinity on every other token."""
    allowed, prompt = (2, 7, 11, 40, 90), shape.sample.prompts[1]
    params = BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, allowed_token_ids=allowed)
    biased = msgspec.structs.replace(
        params,
        allowed_token_ids=None,
        logit_bias={token: -torch.inf for token in range(VOCAB) if token not in allowed},
    )
    (got,), want = shape.ours([Search(prompt, params, EOS)]), shape.theirs(Search(prompt, biased, EOS))
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert {token for tokens, _ in got for token in tokens} <= set(allowed)


def test_logprobs_of_changed_beams_are_those_of_the_model(shape: Shape) -> None:
    prompt = shape.sample.prompts[1]
    params = BeamSearchParams(beam_width=3, max_tokens=6, repetition_penalty=1.4, logprobs=0)
    engine = Engine(shape.runner, shape.runner.model_info, EngineConfig(page_size=8, max_num_batched_tokens=96))
    engine.add(GenerateRequest(request_id="beams", prompt=prompt, params=params))
    tokens: list[int] = []
    logprobs: list[float] = []
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens) and event.index == 0:
                tokens += event.token_ids
                logprobs += [entry.logprob for entry in event.logprobs]
    with torch.inference_mode():
        raw = shape.sample.oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert logprobs == pytest.approx(raw.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=1e-4)


def test_distinct_candidates_score_their_probability(shape: Shape) -> None:
    """In one batch with beams: candidates are distinct and scored as by transformers' logits at that temperature."""
    temperatures = (0.5, 1.0, 2.0)
    searches = [
        Search(
            prompt, SamplingParams(n=6, distinct=True, seed=place, temperature=t, max_tokens=MAX_TOKENS, top_k=20), EOS
        )
        for place, (prompt, t) in enumerate(zip(shape.sample.prompts, temperatures, strict=False))
    ]
    beams = Search(shape.sample.prompts[0], BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS), EOS)
    for search, temperature, answer in zip(searches, temperatures, shape.ours([*searches, beams])[:-1], strict=True):
        assert len({tuple(tokens) for tokens, _ in answer}) == len(answer) == 6
        for tokens, score in answer:
            with torch.inference_mode():
                logits = shape.sample.oracle(torch.tensor([[*search.prompt, *tokens]])).logits[0]
            scaled = logits[len(search.prompt) - 1 : -1] / temperature
            best = scaled.topk(20).values
            chosen = scaled.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            assert (chosen >= best[:, -1] - 1e-4).all()
            assert score == pytest.approx(float((chosen - best.logsumexp(-1)).sum()), rel=1e-4, abs=1e-4)
