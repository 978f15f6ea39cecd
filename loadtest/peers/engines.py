"""The compared engines, each in a process of its own Python, driven by JSON commands."""

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


class PeerError(Exception):
    """An engine cannot be started, or ended early; the text names the engine and the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: the Python it is installed in, its driver script, and the model in its format."""

    name: str
    python: Path
    driver: str
    model: Path


class EngineProcess:
    """A running engine.

    `cpus`: those it runs on. `start_s`: seconds from the start of the process until it accepts commands.
    """

    def __init__(self, peer: Peer, num_threads: int, log: Path) -> None:
        """Start the engine and wait until it accepts commands. Raises: PeerError."""
        self.peer, self._log = peer, log
        results, child_end = os.pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            "PEER_RESULTS": str(child_end),
            "HF_HUB_OFFLINE": "1",
        }
        if peer.name == "chatcache":
            environment["PYTHONPATH"] = _own_path()
        start = time.perf_counter()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(peer.python), str(DRIVERS / peer.driver), str(peer.model)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[child_end], env=environment,
            )  # fmt: skip
        os.close(child_end)
        self.cpus: list[int] | None = None
        if hasattr(os, "sched_setaffinity"):
            self.cpus = sorted(os.sched_getaffinity(0))[:num_threads]
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, self.cpus)
        self._results = os.fdopen(results)
        self._read()
        self.start_s = time.perf_counter() - start

    def execute(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises: PeerError."""
        try:
            self._stdin.write(json.dumps(command).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._error() from error
        return self._read()

    def stop(self) -> None:
        """Request the process to end, and kill it if it does not."""
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
        self._results.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _read(self) -> dict[str, Any]:
        line = self._results.readline()
        if not line:
            raise self._error()
        result: dict[str, Any] = json.loads(line)
        return result

    def _error(self) -> PeerError:
        code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._results.close()
        tail = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        return PeerError(f"{self.peer.name} ended with status {code}: {tail[0][:300]} (all of it: {self._log})")


def write_random(shape: str, folder: Path) -> None:
    """Write random weights of a shape of `chatcache bench --shape`. Raises: CalledProcessError."""
    code = "import sys; from pathlib import Path; from chatcache.bench.drivers import write_named_model\n"
    code += "write_named_model(sys.argv[1], Path(sys.argv[2]))"
    subprocess.run(
        [sys.executable, "-c", code, shape, str(folder)], check=True, env={**os.environ, "PYTHONPATH": _own_path()}
    )


def _own_path() -> str:
    """Return the PYTHONPATH of chatcache and its kernels."""
    root = Path(__file__).parents[2]
    return os.pathsep.join((str(root), str(root / "kernels")))


def find_peers(
    model: Path, scratch: Path, vllm_python: Path | None, llama_python: Path | None
) -> tuple[list[Peer], list[str]]:
    """Return the engines that can be compared, chatcache first, and why others cannot."""
    here = Path(sys.executable)
    peers = [Peer("chatcache", here, "chatcache_driver.py", model)]
    missing = []
    for name, python, module in (("vllm", vllm_python, "vllm"), ("llama.cpp", llama_python, "llama_cpp")):
        if python is None:
            missing.append(f"{name}: left out, no --{name.split('.')[0]}-python given")
        elif not _has(python, module):
            missing.append(f"{name}: left out, {python} has no module {module} (see loadtest/peers/README.md)")
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
