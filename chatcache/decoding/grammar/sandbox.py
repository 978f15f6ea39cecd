"""Trial compilation of a grammar in a child process with limits on time, memory and stack.

The library's own limits are not sufficient: within them, a schema of 19 KB (500 patternProperties) compiled for 69 s,
100 intersected regexes even longer, and 4,000 chained rules overflowed the stack of the whole process. One child runs
at a time and is reused; if a grammar kills it, the exit status shows which limit was exceeded.
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
COMPILE_WALL_S = 10.0  # generous, for loaded machines
COMPILE_MEMORY_BYTES = 1 << 30
COMPILE_STACK_BYTES = 2 << 20  # smaller than the stacks of the engine's threads
_VOLUNTARY_EXITS = (0, -int(getattr(signal, "SIGALRM", 0)))  # normal exits: too much memory in use, or idle for long


class GrammarChecker:
    """Checks grammars by compiling them in the child. Not thread-safe."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[..., GrammarChecker] | None = None

    def check(self, grammar: str) -> str:
        """Return "" if the grammar compiles within the limits, else the reason.

        Raises: EngineError if no child can be started.
        """
        grammar = _rename_tokens(grammar)
        for _ in range(2):
            answer, status, late = self._ask(grammar)
            if answer is not None:
                return answer
            if late or status not in _VOLUNTARY_EXITS:
                break
        return _exit_reason(status, late=late)

    def _ask(self, grammar: str) -> tuple[str | None, int, bool]:
        """Return (answer or None, exit status without an answer, whether it timed out).

        Raises: EngineError.
        """
        status = 0
        for _ in range(2):  # the child may have exited (idle timeout, memory)
            try:
                process = self._child()
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
        """Stop the child if it runs; return its exit status."""
        ending, self._ending, self._process = self._ending, None, None
        return 0 if ending is None else int(ending() or 0)

    def _child(self) -> subprocess.Popen[bytes]:
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
            self._ending = weakref.finalize(self, _close_process, process)  # also when the engine is garbage-collected
            if constraint_child.read_frame(_pipe(process.stdout)) != "ready":
                raise BrokenPipeError("the grammar checker left before it was ready")
        return self._process


def _rename_tokens(grammar: str) -> str:
    """Replace the model's special token ids by those of the child's vocabulary."""
    ids: dict[str, int] = {}

    def name(match: re.Match[str]) -> str:
        token = ids.setdefault(match[1], len(ids) % constraint_child.NUM_NAMED)
        return f"<[{constraint_child.FIRST_NAMED + token}]>"

    return _NAMED.sub(name, grammar)


def _close_process(process: subprocess.Popen[bytes]) -> int:
    """Close the pipes, wait for the child or kill it; return its exit status."""
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


def _exit_reason(status: int, *, late: bool) -> str:
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
