"""The two protocols at the engine's edges: what it needs of a runner, and what the outside may do with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from chatcache.types.events import EngineEvent
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, Explanation, PackedPrompt, PageAccounts, PageMap


class Launched(Protocol):
    """A step that has begun."""

    def result(self) -> StepResult:
        """Wait for the step and return what was drawn. Raises: as `ModelRunner.execute`."""
        ...


class ModelRunner(Protocol):
    """Executes plans. Satisfied structurally by `model.runner.Runner` and `engine.fake.FakeRunner`."""

    def capacity(self) -> KVCapacity: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: `launch` it and wait.

        Raises: DeviceLostError if nothing will ever work again in this process; any other exception means that the
        whole
        step failed; the engine ends its requests, not itself.
        """
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step, behind those launched before; their results are asked for in the same order.

        Where `capacity().has_async_launch`, this may return before the step is done, and one more step may be launched
        before the first one's result is asked for. Raises: as `execute`.
        """
        ...


class EngineClient(Protocol):
    """The only thing `chat` and `gateway` hold of an engine, wherever it runs."""

    async def submit(self, request: GenerateRequest) -> None:
        """Accept a request; from here exactly one terminal event will come.

        Raises: InvalidRequestError or ContextLengthError for what can never run, OverloadedError when the queue is
        full, RateLimitError
        when the namespace's share of it is.
        """
        ...

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        """Yield the request's events with seq > `after`, in order, ending after the terminal one.

        What all readers have dealt with may be gone: read on from there, or read all of it at once.
        """
        ...

    def num_told(self, request_id: str) -> int:
        """Tokens said of a request so far, read or not; 0 once its end was read, and of one that nobody knows."""
        ...

    async def abort(self, request_id: str) -> None:
        """End the request within one step; its stream ends with `Finished(cancelled=True)`. Unknown ids are ignored."""
        ...

    async def drop(self, request_id: str, index: int) -> None:
        """End one candidate within one step: its `CandidateDone` says "cancelled". The others go on; the last: `abort`.

        Unknown requests and candidates that have ended are ignored. Raises: UnsupportedParameterError for searches,
        whose
        candidates are settled together.
        """
        ...

    async def health(self) -> EngineHealth: ...

    async def explain(
        self, prompt: Sequence[int], namespace: str = "", num_public_tokens: int = 0, *, operator: bool = False
    ) -> Explanation:
        """Tell what of a prompt is computed already, and why not more. Changes nothing.

        An `operator` may also learn what other namespaces have computed; a tenant must not.

        Raises: ContextLengthError, InvalidRequestError for a prompt that no request could have.
        """
        ...

    async def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        """Count what of each prompt is computed already, of many between several steps. Changes nothing."""
        ...

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Show every page in one letter: a tenant sees what others have as theirs and no more, an `operator` all."""
        ...

    async def accounts(self) -> PageAccounts:
        """Charge the pages held now to requests, conversations and namespaces."""
        ...
