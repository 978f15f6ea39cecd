"""Cached tokens of many prompts equal `explain` of each, at every step of any workload."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings

from chatcache.engine.engine import Engine
from chatcache.errors import ContextLengthError
from chatcache.kv_cache import manager as cache
from chatcache.kv_cache.manager import PROBE_PAGES
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.types.events import Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import ExplainQuery, PackedPrompt
from tests.engine.driver import drain, engine, request
from tests.engine.generated_workloads import workloads
from tests.engine.workloads import Workload


def check_counts(engine: Engine, prompts: Sequence[tuple[Sequence[int], int]], namespace: str) -> None:
    packed = [PackedPrompt(encode_tokens(tokens), num_public) for tokens, num_public in prompts]
    explained = [
        engine.cache.explain(ExplainQuery(tuple(tokens), namespace, num_public)).num_cached_tokens
        for tokens, num_public in prompts
    ]
    assert engine.cache.count_cached_tokens(packed, namespace) == explained


@pytest.mark.parametrize("few", [1, 3, PROBE_PAGES])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
@pytest.mark.slow
def test_counts_in_every_step_equal_explain(few: int, workload: Workload) -> None:
    engine, _ = workload.engine()
    lines: dict[str, list[int]] = {}
    requests: dict[str, GenerateRequest] = {}
    for arrival in workload.arrivals:
        try:
            engine.add(arrival.request)
        except ContextLengthError:
            continue
        requests[arrival.request.request_id] = arrival.request
        lines[arrival.request.request_id] = list(arrival.request.prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PROBE_PAGES", few)
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Tokens) and event.index == 0:
                    lines[event.request_id] += event.token_ids
            for namespace in {each.namespace for each in requests.values()}:
                mine = [name for name, each in requests.items() if each.namespace == namespace]
                check_counts(engine, [(lines[name], requests[name].num_public_tokens) for name in mine], namespace)


def test_counts_of_long_prompts_with_a_miss_anywhere_equal_explain() -> None:
    one = engine(page_size=4)
    size, rng = one.scheduler.kv.page_size, random.Random(1)
    prompt = tuple(rng.randrange(1, 60) for _ in range((2 * PROBE_PAGES + 1) * size + 3))
    one.add(request(prompt=prompt, params=SamplingParams(max_tokens=2, ignore_eos=True)))
    drain(one)
    few = PROBE_PAGES * size
    for at in (0, 1, size, few - 1, few, few + 1, few + size, len(prompt) - 1):
        changed = (*prompt[:at], 61, *prompt[at + 1 :])
        check_counts(one, [(changed, 0), (prompt[:at] or prompt, 0), (prompt[: at + 1], 0), (prompt[: at + 2], 0)], "")
    assert one.cache.count_cached_tokens([PackedPrompt(encode_tokens(prompt))]) == [len(prompt) - 1]
    assert one.cache.count_cached_tokens([PackedPrompt(encode_tokens(prompt))], "other") == [0]
    assert one.cache.count_cached_tokens([PackedPrompt(b""), PackedPrompt(encode_tokens(prompt[:1]))]) == [0, 0]
