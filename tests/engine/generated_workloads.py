"""Hypothesis strategies for workloads, with normal and with tight page pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from chatcache.engine.admission import worst_case_pages
from chatcache.types.request import (
    BeamSearchParams,
    ForkPoint,
    GenerateRequest,
    SamplingParams,
    num_branches,
    num_gang_branches,
)
from tests.engine.oracle import MODEL_INFO, NARROW, VOCAB, WANDER, RandomForks, expected_answer
from tests.engine.workloads import Arrival, Workload

AHEAD = ["", "eager", "lazy", "lazy"]
_END = MODEL_INFO.eos_token_ids[0]  # the token that ends a message
_FAMILIES = [
    tuple(_END if rng.random() < 0.1 * i else int(t) for t in rng.integers(1, VOCAB, 48))
    for i, rng in enumerate(map(np.random.default_rng, range(3)))
]


def until_it_fails(max_examples: int) -> settings:
    """Return settings for a property with an injected bug: stop at the first failure."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Generate prompts of a few families, so that prefixes are often shared."""
    family = draw(st.sampled_from(_FAMILIES))
    shared = draw(st.integers(1, 40))
    own = draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))
    return (*family[:shared], *own)


@st.composite
def requests(draw: st.DrawFn, number: int, tight: bool = False, calm: bool = False) -> GenerateRequest:
    """Generate a request with any parameters; a `calm` one only samples one token per step."""
    kinds = ["greedy", "sample", "n", NARROW]
    kind = draw(st.sampled_from(kinds if calm else [*kinds, "sample", "distinct", "beam", "beam", WANDER]))
    wandering = dict.fromkeys((WANDER, NARROW), RandomForks.max_branches)
    max_tokens = draw(st.integers(10, 40) if tight else st.one_of(st.integers(1, 12), st.integers(13, 40)))
    params: SamplingParams | BeamSearchParams
    if kind == "beam":
        width, groups = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (3, 3), (6, 2)]))
        params = BeamSearchParams(
            beam_width=width,
            n=draw(st.sampled_from([None, 1, 2])),
            num_beam_groups=groups,
            diversity_penalty=draw(st.sampled_from([0.0, 0.5, 20.0])) if groups > 1 else 0.0,
            stream_beams=draw(st.booleans()),
            logprobs=draw(st.sampled_from([None, 2])),
            max_tokens=max_tokens,
            length_penalty=draw(st.sampled_from([0.0, 1.0])),
            early_stopping=draw(st.one_of(st.booleans(), st.just("never"))),
        )
    else:
        several = draw(st.integers(2, 6))
        n = {"n": several, "distinct": several, **wandering}.get(kind, 1)
        params = SamplingParams(
            n=n,
            distinct=kind == "distinct",
            max_tokens=max_tokens,
            seed=draw(st.integers(0, 99)),
            temperature=0.0 if kind == "greedy" else draw(st.sampled_from([0.7, 1.5, 5.0])),
            top_k=draw(st.sampled_from([0, 5])),
            frequency_penalty=0.0 if calm else draw(st.sampled_from([0.0, 0.5])),
            logprobs=draw(st.sampled_from([None, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
            ignore_eos=tight or draw(st.sampled_from([True, True, False])),
        )
    namespace = kind if kind in wandering else draw(st.sampled_from(["", "", "other"]))
    prompt = draw(prompts())
    num_public = draw(st.sampled_from([0, 0, len(prompt) // 2, len(prompt)]))
    return GenerateRequest(
        request_id=f"r{number}",
        prompt=prompt,
        params=params,
        namespace=namespace,
        num_public_tokens=num_public,
        priority=draw(st.sampled_from([0, 0, -1, 5])),
    )


@st.composite
def drops(draw: st.DrawFn, request: GenerateRequest, step: int) -> tuple[tuple[int, int], ...]:
    """Generate cancellations of candidates, at any step, perhaps of all of them."""
    if num_branches(request.params) == 1 or draw(st.sampled_from([True, False])):
        return ()
    places = st.tuples(st.integers(step, step + 25), st.integers(0, num_branches(request.params)))
    return tuple(draw(st.lists(places, min_size=1, max_size=7)))


@st.composite
def forks(
    draw: st.DrawFn, number: int, source: Arrival, tight: bool = False, calm: bool = False, hybrid: bool = False
) -> Arrival:
    """Generate a request that continues from within another, perhaps streaming, answer."""
    request = draw(requests(number, tight, calm))
    lines = expected_answer(source.request, hybrid=hybrid).tokens
    index = draw(st.sampled_from(sorted(lines)))
    line = (*source.request.prompt, *lines[index])
    prompt = (*line[: draw(st.integers(1, len(line)))], *draw(st.lists(st.integers(1, VOCAB - 1), max_size=4)))
    namespace = draw(st.sampled_from([source.request.namespace, request.namespace]))
    if namespace.startswith(WANDER) != request.namespace.startswith(WANDER):
        namespace = request.namespace
    point = ForkPoint(source.request.request_id, draw(st.sampled_from([0, index])))
    fork = replace(request, prompt=prompt, namespace=namespace, num_public_tokens=0, fork_of=point)
    step = source.step + draw(st.integers(1, 12))
    return Arrival(fork, step, None, draw(drops(fork, step)))


@st.composite
def workloads(
    draw: st.DrawFn,
    tight: bool = False,
    calm: bool = False,
    hybrid: bool = False,
    ahead: Sequence[str] = AHEAD,
    page_sizes: Sequence[int] = (1, 2, 4, 8, 16),
) -> Workload:
    """Generate a workload; a `tight` one has long requests that preempt each other.

    Some workloads have calm requests only, or calm requests among others. `hybrid`: of a model with states.
    """
    arrivals: list[Arrival] = []
    calm = calm or draw(st.sampled_from([False, False, True]))
    for number in range(draw(st.integers(3, 8) if tight else st.integers(1, 7))):
        step = draw(st.sampled_from([0, 0, 0, 1, 3, 9]))
        cancelled_at = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(step, step + 15)))
        if arrivals and draw(st.integers(0, 2)) == 0:
            arrivals.append(draw(forks(number, draw(st.sampled_from(arrivals)), tight, calm, hybrid)))
        else:
            request = draw(requests(number, tight, calm))
            arrivals.append(Arrival(request, step, cancelled_at, draw(drops(request, step))))
    page_size = draw(st.sampled_from(page_sizes))
    branches_at_least = draw(st.sampled_from([num_branches, num_gang_branches]))
    largest = max(
        worst_case_pages(len(r.prompt), r.params.max_tokens or 1, branches_at_least(r.params), page_size)
        for r in (arrival.request for arrival in arrivals)
    )
    num_host_pages = draw(st.sampled_from([12, 40, 300] if tight else [0, 3, 20, 300]))
    spare = [0, 1, 2, 4] if tight else [-1, 0, 0, 1, 2, 4, 8, 200]
    return Workload(
        tuple(arrivals),
        num_pages=max(1 + largest + draw(st.sampled_from(spare)), 2),
        page_size=page_size,
        num_slots=draw(st.sampled_from([16, 32] if tight else [7, 10, 16, 32])),
        budget=draw(st.sampled_from([7, 11, 24, 64, 512])),
        caching=draw(st.sampled_from([True, True, True, False])),
        num_host_pages=num_host_pages,
        preemption=draw(st.sampled_from(["auto", "recompute", "swap", "swap"] if num_host_pages else ["auto"])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority", "fair"])),
        crashes=draw(st.sampled_from([frozenset[int]()] * 3 + [frozenset({9}), frozenset({5, 20, 33})])),
        ahead=draw(st.sampled_from(ahead)),
        num_states=draw(st.sampled_from([10, 10, 13, 24, 80])) if hybrid else 0,
        num_host_states=draw(st.sampled_from([0, 1, 4, 40])) if hybrid and num_host_pages else 0,
        interval=draw(st.sampled_from([2, 8, 1024])) if hybrid else 1024,
        swap_crashes=draw(st.sampled_from([frozenset[int]()] * 3 + [frozenset({1}), frozenset({2, 3})])),
        rests=draw(st.sampled_from([False, False, True])),
    )
