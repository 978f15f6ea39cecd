"""A store whose calls are timed, and which is known to be up or down: every call passes through unchanged."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, cast

from chatcache.chat.store import ConversationStore, StoreUnavailable
from chatcache.gateway.metrics import Metrics


def metered_store(store: ConversationStore, metrics: Metrics) -> ConversationStore:
    """The same store, with its calls in the metrics."""
    return cast(ConversationStore, _Metered(store, metrics))


class _Metered:
    """Stands in for the store; what is no call of the contract is the store's own."""

    def __init__(self, store: ConversationStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._is_up = True
        metrics.store_up.set(1)
        for name, call in vars(ConversationStore).items():
            if not name.startswith("_") and callable(call) and name != "close":
                setattr(self, name, self._timed(name, getattr(store, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        duration = self._metrics.store_seconds.labels(operation=name)

        @wraps(call)
        async def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                result = await call(*args, **kwargs)
            except StoreUnavailable:
                self._note(is_up=False)
                raise
            except Exception:
                self._note(is_up=True)
                raise
            finally:
                duration.observe(time.perf_counter() - started_s)
            self._note(is_up=True)
            return result

        return timed

    def _note(self, *, is_up: bool) -> None:
        if not is_up:
            self._metrics.store_failures.inc()
        if is_up != self._is_up:
            self._is_up = is_up
            self._metrics.store_up.set(int(is_up))
            if not is_up:
                self._metrics.store_outages.inc()
