"""Compiles wait here: one thread for them all, and those who ask take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")


class TurnQueue(Generic[Result]):
    """Runs work in a thread of its own, one piece at a time.

    Owners take turns, whatever each has queued; an owner's own work goes first come, first served. So nobody's queue
    holds up another owner for longer than a piece of work of each.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Result], Callable[[], Result]]]] = OrderedDict()

    def submit(self, owner: str, work: Callable[[], Result]) -> Future[Result]:
        """Queue work; its future can be cancelled until it begins."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
        self._executor.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            owner, queue = self._waiting.popitem(last=False)
            future, work = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind everybody else
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # a panic of the library is no Exception; the future tells it
            future.set_exception(error)
        else:
            future.set_result(result)
