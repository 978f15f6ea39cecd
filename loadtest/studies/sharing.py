"""Figure 15: memory that the sequences of one request save by sharing pages."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from chatcache.types.request import BeamSearchParams, GenerateRequest
from loadtest.lengths import ALPACA, SHAREGPT, GammaLengths
from loadtest.studies import published
from loadtest.studies.results import REAL, SIMULATED, Context, Panel, Published, Row, Series, StudyResult
from loadtest.studies.simulate import Outcome, System, poisson_trace, simulate

WIDTHS = (2, 4, 6)


class _Case(NamedTuple):
    data: str
    lengths: GammaLengths
    rate: float
    seconds: float
    is_beam_search: bool
    paper: dict[int, float] | tuple[float, float]

    @property
    def name(self) -> str:
        return f"{'beam search' if self.is_beam_search else 'parallel sampling'}, {self.data}"

    def published(self, width: int) -> Published:
        return self.paper[width] if isinstance(self.paper, dict) else self.paper


def _measure(job: tuple[GammaLengths, float, float, bool, int, System]) -> Outcome:
    lengths, rate, seconds, is_beam_search, width, system = job
    trace = poisson_trace(lengths, rate, seconds, 1, width, beam=is_beam_search)
    return simulate(trace, replace(system, seconds=seconds, warm_up_s=seconds / 5, drain=False))


def _measure_demo_beams(width: int, num_requests: int) -> float:
    """Return the percent of pages saved by beams of the demo model, on prompts of random tokens."""
    from chatcache import factory
    from chatcache.config import EngineConfig

    engine = factory.build_engine(
        EngineConfig(kv_memory_bytes=2**26, enable_prefix_caching=False), need_tokenizer=False
    )
    rng, sharing, num_steps = random.Random(0), [], 0
    for number in range(num_requests):
        lengths = ALPACA.sample(rng)
        prompt = tuple(rng.randrange(engine.model_info.vocab_size) for _ in range(lengths.prompt))
        params = BeamSearchParams(beam_width=width, max_tokens=lengths.output, ignore_eos=True, early_stopping="never")
        engine.add(GenerateRequest(request_id=f"beam-{number}", prompt=prompt, params=params))
    while engine.has_work():
        engine.step()
        num_steps += 1
        tables = engine.scheduler.tables()
        if num_steps % 4 == 0 and tables:
            sharing.append((sum(table.num_pages for table in tables), engine.scheduler.kv.pool.num_in_use))
    return 100 * Outcome(sharing=sharing).sharing_saved()


def run_fig15(context: Context) -> StudyResult:
    """Measure logical and physical pages with 2, 4 and 6 sequences."""
    cases = [
        _Case("Alpaca", ALPACA, 4.0, context.pick(120.0, 40.0), False, published.FIG15_PARALLEL_ALPACA),
        _Case("ShareGPT", SHAREGPT, 0.25, context.pick(600.0, 200.0), False, published.FIG15_PARALLEL_SHAREGPT),
        _Case("Alpaca", ALPACA, 2.0, context.pick(60.0, 12.0), True, published.FIG15_BEAM_ALPACA),
    ]
    if not context.quick:
        cases.append(_Case("ShareGPT", SHAREGPT, 0.1, 300.0, True, published.FIG15_BEAM_SHAREGPT))
    system = System(cost=context.cost)
    jobs = [
        (case.lengths, case.rate, case.seconds, case.is_beam_search, width, system)
        for case in cases
        for width in WIDTHS
    ]
    saved = iter([100 * outcome.sharing_saved() for outcome in context.map(_measure, jobs, 0.8)])
    rows, panels = [], []
    for case in cases:
        ours = {width: next(saved) for width in WIDTHS}
        rows += [
            Row("15", f"{case.name}, {width}", value, case.published(width), "%", SIMULATED)
            for width, value in ours.items()
        ]
        labels = tuple(map(str, WIDTHS))
        series = [Series("ours", labels, tuple(ours.values()))]
        if isinstance(case.paper, dict):
            series.append(Series("paper", labels, tuple(case.paper.values()), is_published=True))
        panels.append(
            Panel(title=case.name, x_label="sequences per request", y_label="pages saved (%)", kind="bars",
                  series=tuple(series),
                  limit=(case.paper[1], "highest in the paper") if isinstance(case.paper, tuple) else None)
        )  # fmt: skip
    num_requests, labels = context.pick(48, 16), tuple(map(str, WIDTHS))
    real = context.map(partial(_measure_demo_beams, num_requests=num_requests), WIDTHS, 0.2)
    for width, value in zip(WIDTHS, real, strict=True):
        paper = published.FIG15_BEAM_ALPACA[width]
        rows.append(Row("15", f"beam search, Alpaca lengths, demo model, {width}", value, paper, "%", REAL))
    beams = panels[2]
    panels[2] = replace(beams, series=(*beams.series, Series("ours, demo model", labels, tuple(real))))
    return StudyResult(
        name="fig15",
        title="Figure 15: memory saved by sharing pages (OPT-13B)",
        question="How much memory does sharing within a request save?",
        answer=f"Six candidates of Alpaca requests save {rows[2].ours:.0f} % of the pages, of ShareGPT requests, "
        f"whose prompts are longer, {rows[5].ours:.0f} %; six beams of the demo model save {real[-1]:.0f} %, and "
        f"{rows[8].ours:.0f} % in the simulation, where the log-probabilities of beams are random and chosen to fit: "
        "how often beams fork depends on the model. The assumed spread of the lengths decides how much candidates "
        "save.",
        rows=tuple(rows),
        panels=tuple(panels),
    )
