"""Prompt log-probabilities: the scores of each step, put behind those of the steps before."""

from __future__ import annotations

from math import isnan

from chatcache.engine.results import alternatives
from chatcache.errors import EngineFault
from chatcache.sched.batch import Step
from chatcache.sched.plan import StepResult
from chatcache.sched.request import LiveRequest
from chatcache.types.events import TokenLogprob


def collect_scores(step: Step, result: StepResult) -> dict[LiveRequest, Exception]:
    """Give each scored request its new scores; return whose came back as no numbers.

    A request starts only on tokens whose successors it has scored, so the next score is always among the step's.
    """
    plan = step.plan.scores
    if plan is None or result.scores is None or result.score_tokens is None or result.score_logprobs is None:
        return {}
    scores, targets = result.scores.tolist(), plan.targets.tolist()
    tops = alternatives(result.score_tokens, result.score_logprobs)
    faults: dict[LiveRequest, Exception] = {}
    place = 0
    for request, _, _, num_tokens in step.scored:
        for cell in range(place, place + num_tokens):
            if targets[cell] < 0:
                continue
            if isnan(scores[cell]):
                faults[request] = EngineFault("the prompt's log-probabilities are not numbers")
                break
            request.prompt_scores.append(TokenLogprob(scores[cell], tops[cell][: request.num_prompt_top]))
        place += num_tokens
    return faults
