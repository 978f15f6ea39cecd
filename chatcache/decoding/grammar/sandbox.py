"""Try a grammar in a child process before the engine compiles it: time, memory and stack are bounded there.

One child at a time, kept while it behaves. Whatever kills it is the grammar's fault, and said so. The library has
limits of its own, but within them a schema of 19 KB (500 patternProperties) compiled for 69 s, 100 intersected regexes
for longer than anybody waited, and 4,000 rules in a chain overflowed the stack of the whole process.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from chatcache.decoding.grammar import sandbox_process as constraint_child
from chatcache.errors import EngineError

_NAMED = re.compile(r"<\[(\d+)\]>")
COMPILE_CPU_S = 1.0
COMPILE_WALL_S = 10.0  # on a machine that has better to do
COMPILE_MEMORY_BYTES = 1 << 30
COMPILE_STACK_BYTES = 2 << 20  # less than the engine's own threads have
_LEFT = (0, -int(getattr(signal, "SIGALRM", 0)))  # of its own accord: it had grown, or was idle for long


class GrammarChecker:
    """Judges grammars. Use it from one thread."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[..., GrammarChecker] | None = None

    def check(self, grammar: str) -> str:
        """Return "" for a grammar that compiles within bounds, else why not.

        Raises: EngineError if no child can be started.
        """
        grammar = _renamed(grammar)
        for _ in range(2):
            answer, status, late = self._ask(grammar)
            if answer is not None:
                return answer
            if late or status not in _LEFT:
                break
        return _obituary(status, late=late)

    def _ask(self, grammar: str) -> tuple[str | None, int, bool]:
        """The answer; without one the child's exit status, and whether it took too long. Raises: EngineError."""
        status = 0
        for _ in range(2):  # a child that was idle for long, or that the system was short of memory for, may have left
            try:
                process = self._running()
                constraint_child.write_frame(_pipe(process.stdin), grammar)
                break
            except OSError:
                status = self.close()
        else:
            raise EngineError(f"the grammar checker did not start (exit status {status})")
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(COMPILE_WALL_S, give_up)
        timer.start()
        try:
            answer = constraint_child.read_frame(_pipe(process.stdout))
        finally:
            timer.cancel()
        return answer, 0 if answer is not None else self.close(), late.is_set()

    def close(self) -> int:
        """End the child, if there is one; return its exit status."""
        ending, self._ending, self._process = self._ending, None, None
        return 0 if ending is None else int(ending() or 0)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            spec = {
                "cpu_s": COMPILE_CPU_S,
                "memory_bytes": COMPILE_MEMORY_BYTES,
                "stack_bytes": COMPILE_STACK_BYTES,
                "limits": self._limits,
            }
            command = [sys.executable, "-P", str(Path(constraint_child.__file__)), json.dumps(spec)]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise EngineError(f"the grammar checker did not start: {error}") from error
            self._process = process
            self._ending = weakref.finalize(self, _end, process)  # also when the engine is forgotten
            if constraint_child.read_frame(_pipe(process.stdout)) != "ready":
                raise BrokenPipeError("the grammar checker left before it was ready")
        return self._process


def _renamed(grammar: str) -> str:
    """Name the child's special tokens instead of the model's: which ones they are changes nothing."""
    ids: dict[str, int] = {}

    def name(match: re.Match[str]) -> str:
        token = ids.setdefault(match[1], len(ids) % constraint_child.NUM_NAMED)
        return f"<[{constraint_child.FIRST_NAMED + token}]>"

    return _NAMED.sub(name, grammar)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Make sure that the child is gone, and its pipes; return its exit status."""
    if process.stdin is not None and not process.stdin.closed:
        try:
            process.stdin.close()
        except OSError:
            pass
    if process.stdout is not None:
        process.stdout.close()
    try:
        return process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _obituary(status: int, *, late: bool) -> str:
    if late:
        return f"it takes more than {COMPILE_WALL_S:g} s to compile"
    if status == -getattr(signal, "SIGPROF", 0):
        return f"it takes more than {COMPILE_CPU_S:g} s of computing to compile"
    if status in (-signal.SIGSEGV, -getattr(signal, "SIGBUS", 0)):
        return "it is nested too deeply"
    return f"it takes more than {COMPILE_MEMORY_BYTES >> 20} MiB to compile"


def _pipe(stream: Any) -> Any:
    if stream is None:
        raise EngineError("the grammar checker has no pipe")
    return stream
