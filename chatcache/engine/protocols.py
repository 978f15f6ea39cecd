"""Interfaces of the engine: the model runner below it and the client above it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from chatcache.types.events import EngineEvent
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, ExplainQuery, Explanation, PackedPrompt, PageAccounts, PageMap


class StepHandle(Protocol):
    """A launched step whose result can be awaited."""

    def result(self) -> StepResult:
        """Wait for the step and return the sampled tokens. Raises: as `ModelRunner.execute`."""
        ...


class ModelRunner(Protocol):
    """Executes step plans.

    `model.runner.Runner` is the implementation; tests use a runner without a model.
    """

    def capacity(self) -> KVCapacity: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: `launch` it and wait for its result.

        Raises: DeviceLostError if the device cannot be used by this process any more. Any other exception means that
        this step failed: the engine fails its requests and continues.
        """
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueue a step after the steps launched before; results are awaited in the same order.

        With `capacity().has_async_launch`, this may return before the step is done, and one more step may be launched
        before the result of the first is awaited. Raises: as `execute`.
        """
        ...

    def check_device(self) -> None:
        """Raise DeviceLostError if an idle runner has lost a part that the next step needs. Called between steps."""
        ...


class RequestRecorder(Protocol):
    """Leaves records of requests, from which another gateway can take them over when this one has ended.

    `on_adopt` is called with a request of another gateway that has ended, the data of its record, the number of its
    events so far, and how often it was taken over; it returns whether this gateway continues it. `on_lost` is called
    with the id of a request that another gateway has taken over from this one. `owns` is asked about a request whose
    record is missing, and returns whether no other gateway has taken it over.
    """

    on_adopt: Callable[[GenerateRequest, bytes, int, int], Awaitable[bool]] | None
    on_lost: Callable[[str], None] | None
    owns: Callable[[str], Awaitable[bool]] | None

    async def record(self, request_id: str, data: bytes) -> bool:
        """Leave a record of a running request, with `data` for the gateway that takes it over.

        Returns False if that is not possible now; it is tried again.
        """
        ...

    def leave(self, request_id: str) -> None:
        """Leave a request that has a record to the gateway that takes it over when this one is closed."""
        ...

    def discard_record(self, request_id: str) -> None:
        """Delete the record of a request that needs no other gateway any more."""
        ...


@runtime_checkable
class RecordingEngine(Protocol):
    """An engine client whose requests another gateway can take over."""

    @property
    def recorder(self) -> RequestRecorder: ...


class EngineClient(Protocol):
    """Asynchronous interface of an engine in this process or another one.

    `conversations` and `gateway` depend on it only.
    """

    async def submit(self, request: GenerateRequest) -> None:
        """Accept a request, which then ends in exactly one terminal event.

        Raises: InvalidRequestError or ContextLengthError for a request that can never run, OverloadedError when the
        queue is full, RateLimitError when the namespace has used its share of the queue.
        """
        ...

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        """Yield the request's events with seq > `after`, in order, up to the terminal one.

        Events that every present reader has processed may be discarded: a reader that reconnects passes as `after` the
        last event that it has processed.
        """
        ...

    def num_tokens_sent(self, request_id: str) -> int:
        """Return how many tokens a request has emitted, read or not.

        0 for an unknown id, and after the terminal event was read.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End the request within one step with `Finished(cancelled=True)`.

        Unknown ids are ignored.
        """
        ...

    async def cancel_candidate(self, request_id: str, index: int) -> None:
        """End one candidate within one step with a `CandidateDone` of reason "cancelled".

        The other candidates continue; cancelling the last one aborts the request. Unknown requests and candidates that
        have ended are ignored. Raises: UnsupportedParameterError for searches, whose candidates end together.
        """
        ...

    async def health(self) -> EngineHealth: ...

    async def explain(self, query: ExplainQuery) -> Explanation:
        """Report which pages of a prompt are cached, and why the first missing page is not.

        Raises: ContextLengthError, InvalidRequestError for a prompt that no request could have.
        """
        ...

    async def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        """Return the number of cached tokens of each prompt. Changes nothing.

        A long list is split into batches, so that the engine can run steps in between.
        """
        ...

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Return the state of every page as one letter.

        A tenant sees pages of other tenants only as such; an `operator` sees the state of all pages.
        """
        ...

    async def page_accounts(self) -> PageAccounts:
        """Charge the pages held now to requests, conversations and namespaces."""
        ...
