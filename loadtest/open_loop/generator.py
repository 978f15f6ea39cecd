"""Sends a plan to a server, each request at its planned time.

The prompts and requests of first turns are built before the start. One task sleeps until each arrival and starts a
task for the conversation, so a slow server delays no arrival. All latencies are measured from the planned time: a
generator that is late makes them longer, not shorter, and reports its lag.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from loadtest.open_loop.server import Completion, Server, complete
from loadtest.open_loop.workload import Plan, PlannedConversation, PlannedTurn, PromptTokens

RESERVED_FILES = 64  # file descriptors that are not connections
PLACEHOLDER_TOKEN = 0  # unit that stands for a reply token whose id the server does not return


@dataclass(slots=True)
class RequestResult:
    """One request as planned and as completed. Times are seconds after the start of the run.

    `lag_s`: actual minus planned send time. `ttft_s` and `latency_s` count from the planned time. `gaps_s`: between
    consecutive streamed texts. `num_ideal_cached`: prompt tokens that an infinite cache would have found.
    `num_cached`: as the server reported, None if it does not.
    """

    conversation: int
    turn: int
    planned_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_ideal_cached: int = 0
    lag_s: float = 0.0
    ttft_s: float | None = None
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_reported_prompt_tokens: int = 0
    num_received_tokens: int = 0
    num_cached: int | None = None
    error: str = ""
    detail: str = ""

    @property
    def itl_s(self) -> float | None:
        """Mean time between output tokens: from the first to the last token, per token after the first."""
        if self.ttft_s is None or self.num_received_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.num_received_tokens - 1)


def max_connections() -> int:
    """Raise the limit of open files as far as allowed, and return how many connections fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(soft - RESERVED_FILES, 1)


class LoadGenerator:
    """One run of a plan against one server. `on_result` is called after each request.

    At most `max_in_flight` requests are open: further ones fail at once, with a name of their own, and are not delayed.
    """

    def __init__(
        self,
        server: Server,
        plan: Plan,
        *,
        timeout_s: float = 600.0,
        max_in_flight: int | None = None,
        on_result: Callable[[RequestResult], None] = lambda result: None,
    ) -> None:
        self._server, self._plan, self._timeout_s, self._on_result = server, plan, timeout_s, on_result
        self._max_in_flight = max_in_flight or max_connections()
        self._tokens = PromptTokens(plan, server.num_units)
        self._results: list[RequestResult] = []
        self._num_in_flight = self.max_in_flight = 0
        self._start_s = 0.0

    async def run(self) -> tuple[list[RequestResult], float]:
        """Send everything, wait for all replies, and return the results in planned order, and the seconds it took."""
        prompts = [self._prompt(each.turns[0], number, 0) for number, each in enumerate(self._plan.conversations)]
        requests = [
            self._request(prompt, conversation)
            for prompt, conversation in zip(prompts, self._plan.conversations, strict=True)
        ]
        loop = asyncio.get_running_loop()
        self._start_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number, conversation in enumerate(self._plan.conversations):
                await asyncio.sleep(self._start_s + conversation.at_s - loop.time())
                tasks.create_task(self._converse(number, conversation, prompts[number], requests[number]))
        wall_s = loop.time() - self._start_s
        return sorted(self._results, key=lambda result: (result.planned_s, result.conversation)), wall_s

    def _prompt(self, turn: PlannedTurn, conversation: int, number: int) -> list[int] | str:
        """Return the new part of a turn's prompt."""
        units = self._tokens.draw(turn, conversation, number)
        return self._server.encode(units if number else units[self._server.num_special_tokens :])

    def _request(self, prompt: list[int] | str, conversation: PlannedConversation, turn: int = 0) -> bytes:
        has_next = turn + 1 < len(conversation.turns)
        return self._server.request(prompt, conversation.turns[turn].num_output_tokens, with_token_ids=has_next)

    async def _converse(
        self, conversation: int, planned: PlannedConversation, prompt: list[int] | str, request: bytes
    ) -> None:
        """Send the turns of a conversation, each after the previous reply and its think time; a failure ends it."""
        planned_s, num_history = planned.at_s, 0
        for number, turn in enumerate(planned.turns):
            if number:
                await asyncio.sleep(self._start_s + planned_s - asyncio.get_running_loop().time())
            result = RequestResult(
                conversation,
                number,
                planned_s,
                num_history + turn.num_prompt_tokens,
                turn.num_output_tokens,
                turn.num_ideal_cached or max(num_history - 1, 0),  # the last token of a reply was never computed
            )
            completion = await self._send(request, result)
            self._results.append(result)
            self._on_result(result)
            if result.error or number + 1 == len(planned.turns):
                return
            planned_s += result.latency_s + planned.turns[number + 1].think_s
            num_history = result.num_prompt_tokens + result.num_received_tokens
            prompt = self._continue(
                prompt, completion, self._prompt(planned.turns[number + 1], conversation, number + 1)
            )
            request = self._request(prompt, planned, number + 1)

    def _continue(self, prompt: list[int] | str, reply: Completion, new: list[int] | str) -> list[int] | str:
        """Return the next prompt: the last one, the reply, and the new part."""
        if isinstance(prompt, str) or isinstance(new, str):
            return f"{prompt}{reply.text}{new}"
        missing = self._server.encode([PLACEHOLDER_TOKEN] * (reply.num_output_tokens - len(reply.token_ids)))
        return [*prompt, *reply.token_ids, *(token for token in missing if isinstance(token, int)), *new]

    async def _send(self, request: bytes, result: RequestResult) -> Completion:
        if self._num_in_flight >= self._max_in_flight:
            result.error, result.detail = "connection limit", f"{self._max_in_flight} requests were open"
            return Completion()
        self._num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)
        try:
            completion = await complete(self._server, request, self._timeout_s)
        finally:
            self._num_in_flight -= 1
        planned_s, times = self._start_s + result.planned_s, completion.token_times_s
        result.lag_s = completion.started_s - planned_s
        result.latency_s = (completion.ended_s if completion.error else completion.finished_s) - planned_s
        result.ttft_s = times[0] - planned_s if times else None
        result.gaps_s = [later - earlier for earlier, later in pairwise(times)]
        result.num_reported_prompt_tokens = completion.num_prompt_tokens
        result.num_received_tokens = completion.num_output_tokens or len(times)
        result.num_cached, result.error, result.detail = (
            completion.num_cached_tokens,
            completion.error,
            completion.detail,
        )
        return completion
