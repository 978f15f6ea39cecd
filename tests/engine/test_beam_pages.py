"""Pages that a beam search holds, compared with the minimum for the same branches."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64
PAGE_SIZE = 16


@dataclass
class PageCounts:
    """Pages held and ideal number of pages, at each recorded moment."""

    entries: list[tuple[int, int]] = field(default_factory=list)

    def enter(self, engine: Engine, *, computing: bool) -> None:
        """Record the current page counts.

        The ideal tree has a page for every distinct prefix of a live branch that ends at a page boundary or with the
        branch. While a step runs, the tokens granted in it count.
        """
        ideal: set[tuple[int, ...]] = set()
        for request in engine.scheduler.running:
            for branch in request.branches.values():
                if branch.table is None:
                    continue  # preempted, and not yet back
                num_tokens = branch.num_tokens if computing else branch.table.num_tokens
                tokens = tuple(branch.tokens()[: min(num_tokens, branch.table.num_reserved)].tolist())
                ideal |= {tokens[: start + PAGE_SIZE] for start in range(0, len(tokens), PAGE_SIZE)}
        self.entries.append((engine.health().num_pages_in_use, len(ideal)))

    def ratio(self) -> float:
        return sum(held for held, _ in self.entries) / sum(ideal for _, ideal in self.entries)

    def worst(self) -> float:
        return max(held / ideal for held, ideal in self.entries if ideal)


class WatchedRunner(FakeRunner):
    """Records the page counts of a step after its pages were allocated and before it runs."""

    engine: Engine
    ledger: PageCounts

    def execute(self, plan: StepPlan) -> StepResult:
        self.ledger.enter(self.engine, computing=True)
        return super().execute(plan)


def run(searches: list[Params], num_prompt_tokens: int, num_pages: int = 2048) -> tuple[PageCounts, Engine]:
    """Run the searches on different prompts and record every step twice."""
    runner = WatchedRunner(fake_capacity(num_pages=num_pages, page_size=PAGE_SIZE), VOCAB, eos_every=40)
    engine = Engine(runner, fake_model_info(VOCAB), EngineConfig(page_size=PAGE_SIZE))
    runner.engine, runner.ledger = engine, PageCounts()
    for number, params in enumerate(searches):
        prompt = tuple((number * 17 + i * i) % (VOCAB - 1) + 1 for i in range(num_prompt_tokens))
        engine.add(GenerateRequest(request_id=str(number), prompt=prompt, params=params))
    while engine.has_work():
        engine.step()
        engine.cache.check()
        runner.ledger.enter(engine, computing=False)
    assert engine.health().num_pages_in_use == 0
    return runner.ledger, engine


SEARCHES: dict[str, Params] = {
    "4": BeamSearchParams(beam_width=4, max_tokens=64, ignore_eos=True),
    "8": BeamSearchParams(beam_width=8, max_tokens=64, ignore_eos=True),
    "8-eos": BeamSearchParams(beam_width=8, max_tokens=64, early_stopping="never"),
    "8-groups": BeamSearchParams(beam_width=8, max_tokens=64, num_beam_groups=4, diversity_penalty=0.5),
    "distinct": SamplingParams(n=8, max_tokens=64, distinct=True, seed=3, ignore_eos=True),
}


@pytest.mark.parametrize("num_prompt_tokens", [5, 16, 64, 71])
@pytest.mark.parametrize("name", SEARCHES)
def test_beam_search_holds_only_the_pages_of_the_ideal_tree(name: str, num_prompt_tokens: int) -> None:
    """The goal is a ratio of 1.05; the ratio here is 1.0."""
    ledger, _ = run([SEARCHES[name]], num_prompt_tokens)
    assert len(ledger.entries) > 40
    assert ledger.ratio() <= 1.05
    assert ledger.worst() == 1.0


def test_preempted_beam_searches_hold_only_the_pages_of_the_ideal_trees() -> None:
    ledger, engine = run(list(SEARCHES.values()), 40, num_pages=48)
    assert engine.health().num_preemptions > 0
    assert ledger.ratio() <= 1.05
