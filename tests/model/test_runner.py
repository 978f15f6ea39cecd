"""The runner applies a plan in the documented order; transformers is the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.page_tables import PageTables
from chatcache.model.runner import Runner
from chatcache.types.events import Tokens
from chatcache.types.plan import Rows, StepPlan, StepResult
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.model.drive import Driver, make_draws
from tests.model.families import VOCAB, Sample

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


def check_logprobs(result: StepResult, draw: int, sample: Sample, tokens: tuple[int, ...]) -> None:
    want = sample.logprobs(tokens)[torch.from_numpy(result.top_tokens[draw]).long()]
    torch.testing.assert_close(torch.from_numpy(result.top_logprobs[draw]), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("length", [5, 8, 17])
def test_forks_share_pages_and_diverge(length: int, backend: str, sample_of: Get, load: Load) -> None:
    """Two forks of a branch write different tokens into copies of its partial page.

    No branch reads the tokens of the others.
    """
    sample = sample_of("llama")
    prompt = sample.prompts[2][:length]
    driver = Driver(load(sample.folder, attention_backend=backend))
    driver.feed({0: prompt})
    driver.fork(0, 3)
    driver.fork(0, 1)
    tails = {0: (7, 8, 9), 3: (100, 101, 102), 1: (30, 31, 32)}
    for count in (1, 2, 3):
        fed = {slot: tail[count - 1 : count] for slot, tail in tails.items()}
        result = driver.feed(fed, make_draws([{"row": row, "num_top": VOCAB} for row in range(3)]))
        for row, tail in enumerate(tails.values()):
            check_logprobs(result, row, sample, prompt + tail[:count])


def test_row_can_have_several_draws(sample_of: Get, load: Load) -> None:
    sample = sample_of("llama")
    driver = Driver(load(sample.folder))
    specs = [{"row": 1, "temperature": 1.0, "lane": lane, "num_top": VOCAB * (lane == 2)} for lane in range(6)]
    result = driver.feed({0: sample.prompts[0], 1: sample.prompts[1]}, make_draws([*specs, {"row": 0, "width": 4}]))
    assert len(set(result.tokens[:6, 0].tolist())) > 1
    check_logprobs(result, 2, sample, sample.prompts[1])
    best = sample.logprobs(sample.prompts[0]).topk(4)
    assert result.tokens[6].tolist() == best.indices.tolist()
    np.testing.assert_allclose(result.logprobs[6], best.values, atol=1e-4)


def test_rows_without_draws_and_plans_without_rows(sample_of: Get, load: Load) -> None:
    sample = sample_of("llama")
    driver = Driver(load(sample.folder))
    assert driver.feed({0: sample.prompts[1][:9]}, make_draws([])).tokens.size == 0
    driver.fork(0, 1)
    assert driver.feed({}, make_draws([])).tokens.size == 0  # forks and copies alone
    result = driver.feed({1: sample.prompts[1][9:]}, make_draws([{"num_top": VOCAB}]))
    check_logprobs(result, 0, sample, sample.prompts[1])


def test_table_order_is_forks_then_updates() -> None:
    tables = PageTables(4, 3, 8)
    tables.rows[0] = (5, 6, 7)
    forks = np.array([(0, 1, 2), (1, 2, 2), (0, 2, 1)], np.int32)
    tables.apply(forks, np.array([(2, 1, 9), (0, 0, 4)], np.int32))
    assert tables.rows.tolist() == [[4, 6, 7], [5, 6, 0], [5, 9, 0], [0, 0, 0]]


def test_token_without_a_page_is_rejected(sample_of: Get, load: Load) -> None:
    """Else it would be written to the null page, silently."""
    runner = load(sample_of("llama").folder)
    one = np.ones(1, np.int32)
    none = np.zeros((0, 3), np.int32)
    rows = Rows(slot=one, start=0 * one, num_tokens=one, tokens=one)
    plan = StepPlan(0, none, none, none[:, :2], rows, make_draws([{}]))
    with pytest.raises(ValueError, match="position 0 has no page"):
        runner.execute(plan)


def test_engine_accepts_steps_without_draws(sample_of: Get, load: Load) -> None:
    """A prompt alone, longer than a step: its first chunks have no draws."""
    sample = sample_of("llama")
    runner = load(sample.folder)
    engine = Engine(runner, runner.model_info, EngineConfig(page_size=8, max_num_batched_tokens=9))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add(GenerateRequest(request_id="one", prompt=sample.prompts[3], params=params))
    events = [event for _ in range(30) if engine.has_work() for event in engine.step()]
    assert [token for event in events if isinstance(event, Tokens) for token in event.token_ids] == [
        *sample.answers[3][:4]
    ]
