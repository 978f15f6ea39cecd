"""Requests that are accepted but whose grammar is still being compiled, beside the loop."""

from __future__ import annotations

from collections.abc import Iterator

from chatcache.decode.constraint_compiler import Ticket
from chatcache.sched.request import LiveRequest


class Preparing:
    """In the order of their arrival; one that is slow holds up no other."""

    def __init__(self) -> None:
        self._tickets: dict[LiveRequest, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._tickets

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self._tickets)

    def of(self, namespace: str) -> tuple[int, int]:
        """Count a namespace's requests, and the tokens of their prompts."""
        sizes = [len(request.prompt) for request in self._tickets if request.namespace == namespace]
        return len(sizes), sum(sizes)

    def add(self, request: LiveRequest, ticket: Ticket) -> None:
        self._tickets[request] = ticket

    def remove(self, request: LiveRequest) -> None:
        """Forget a request; a compile that was to begin for it alone does not, so that nobody waits behind it."""
        ticket = self._tickets.pop(request)
        if all(other.future is not ticket.future for other in self._tickets.values()):
            ticket.abandon()

    def take(self, timeout_s: float) -> Iterator[tuple[LiveRequest, BaseException | None]]:
        """Yield those that are ready, each with what went wrong, if anything did; wait so long for the first."""
        if timeout_s and not any(ticket.ready for ticket in self._tickets.values()):
            next(iter(self._tickets.values())).grammars.wait(timeout_s)
        for request, ticket in list(self._tickets.items()):
            if ticket.ready:
                del self._tickets[request]
                yield request, ticket.failure()
