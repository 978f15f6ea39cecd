"""Peers as processes of their own Pythons, driven line by line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVERS = Path(__file__).parent / "drivers"
CONVERT_TIMEOUT_S = 600


class PeerFault(Exception):
    """A peer cannot be started, or died; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: the Python that has it, its driver, and the model as it wants it."""

    name: str
    python: Path
    driver: str
    model: Path


class Process:
    """A running peer. `start_s`: from its start until it could answer."""

    def __init__(self, peer: Peer, num_threads: int, log: Path) -> None:
        """Raises: PeerFault."""
        self.peer, self._log = peer, log
        answers, theirs = os.pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            "PEER_ANSWERS": str(theirs),
            "HF_HUB_OFFLINE": "1",
        }
        if peer.name == "chatcache":
            environment["PYTHONPATH"] = _own_path()
        start = time.perf_counter()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(peer.python), str(DRIVERS / peer.driver), str(peer.model)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[theirs], env=environment,
            )  # fmt: skip
        os.close(theirs)
        if hasattr(os, "sched_setaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, allowed[:num_threads])
        self._answers = os.fdopen(answers)
        self._read()
        self.start_s = time.perf_counter() - start

    def ask(self, **command: Any) -> dict[str, Any]:
        """Return the answer to a command. Raises: PeerFault."""
        try:
            self._stdin.write(json.dumps(command).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._fault() from error
        return self._read()

    def stop(self) -> None:
        """Let it end by itself, else end it."""
        if self._stdin.closed:  # it has ended already
            return
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b'{"do": "quit"}\n')
            self._stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise self._fault()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fault(self) -> PeerFault:
        code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._answers.close()
        tail = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return PeerFault(f"{self.peer.name} ended with status {code}: {tail[0][:300]} (all of it: {self._log})")


def write_random(folder: Path) -> None:
    """Write random weights of the SmolLM2-135M shape. Raises: CalledProcessError."""
    script = str(DRIVERS / "chatcache_model.py")
    subprocess.run([sys.executable, script, str(folder)], check=True, env={**os.environ, "PYTHONPATH": _own_path()})


def _own_path() -> str:
    """Return where chatcache and its kernels lie, as Python's search path."""
    root = Path(__file__).parents[2]
    return os.pathsep.join((str(root), str(root / "kernels")))


def find_peers(
    model: Path, scratch: Path, vllm_python: Path | None, llama_python: Path | None
) -> tuple[list[Peer], list[str]]:
    """Return the engines that can be compared, chatcache first, and a line for each that cannot."""
    here = Path(sys.executable)
    peers = [Peer("chatcache", here, "chatcache_driver.py", model)]
    missing = []
    for name, python, module in (("vllm", vllm_python, "vllm"), ("llama.cpp", llama_python, "llama_cpp")):
        if python is None:
            missing.append(f"{name}: left out, no --{name.split('.')[0]}-python given")
        elif not _has(python, module):
            missing.append(f"{name}: left out, {python} has no module {module} (README.md beside this script)")
        elif name == "vllm":
            peers.append(Peer(name, python, "vllm_driver.py", model))
        else:
            file = scratch / "model.gguf"
            done = subprocess.run(
                [str(python), str(DRIVERS / "to_gguf.py"), str(model), str(file)],
                capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S,
            )  # fmt: skip
            if done.returncode == 0:
                peers.append(Peer(name, python, "llama_driver.py", file))
            else:
                reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
                missing.append(f"{name}: left out, the model could not be written as GGUF: {reason[0]}")
    return [*peers, Peer("transformers", here, "transformers_driver.py", model)], missing


def _has(python: Path, module: str) -> bool:
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([str(python), "-c", script], capture_output=True).returncode == 0
    except OSError:
        return False
