"""Tensor parallelism: the processes of one machine that compute every layer together, on CPUs.

Rank 0 is the engine's process. It schedules, samples, and starts the other ranks. A rank has its own share of the
attention heads and of the MLP, and the KV pages of its heads under the same page ids. All ranks have the embeddings;
only rank 0 has the output head.

    rank 0:  plan -> send -> layers (2 sums each) -> head -> sampler -> result
    rank r:  receive plan -> layers (2 sums each)

The inputs of a layer are equal on all ranks, so qkv and gate/up are divided by outputs (columns of x W^T) without
communication. The attention output and down projections are divided by inputs, and their partial outputs are summed
over the ranks. A model with fewer key/value heads than ranks has each head on several of them.

Plans are msgpack over one socket pair per rank. The sums use the gloo process group of `torch.distributed` on the
loopback interface, without its global state. A step that fails on rank 0 ends the group, because the ranks may then
disagree about the contents of pages. A rank that ends closes its connections, which fails the step at once; one that
does not answer fails it after `STEP_TIMEOUT_S`. Between steps, rank 0 checks whether the other ranks still run. These
end with rank 0, which closes its end of their socket pairs.

Source: Shoeybi et al. 2019, "Megatron-LM".
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from chatcache.config import EngineConfig
from chatcache.errors import DeviceLostError, ModelFolderError
from chatcache.model.linear import Linear
from chatcache.model.loading.config_reader import Architecture
from chatcache.model.loading.weights import Part, WeightSource
from chatcache.model.sampling.sampler import CompletedDraws
from chatcache.types.plan import I32, Draws, KVCapacity, Rows, Scores, StepPlan, StepResult

log = logging.getLogger(__name__)

STEP_TIMEOUT_S = 8.0  # of one sum while the model runs; a dead rank must end the worker within 10 s
LOAD_TIMEOUT_S = 1800.0  # of the sums while ranks load weights and compile kernels, each at its own pace
CLOSE_TIMEOUT_S = 5.0
MAX_RANKS = 64
RANK_PROGRAM = "import sys; from chatcache.model.loading.loader import run_rank; run_rank(int(sys.argv[1]))"
_LENGTH = struct.Struct(">I")

_distributed: Any = dist  # its stubs lack the methods of process groups

Span = tuple[int, int]  # first and end index


class RankStart(msgspec.Struct, frozen=True):
    """First message to a rank. `store`: the file by which the ranks find each other."""

    config: EngineConfig
    rank: int
    store: str


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"a plan cannot contain {type(value).__name__}")


def _decode_array(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan for the other ranks: without edits and masks, since only rank 0 samples."""
    return msgspec.msgpack.encode(replace(plan, draws=replace(plan.draws, edits=(), masks=())), enc_hook=_encode_array)


def decode_plan(data: bytes) -> StepPlan:
    """Return the plan of `encode_plan`."""
    return msgspec.msgpack.decode(data, type=StepPlan, dec_hook=_decode_array)


def read_frame(sock: socket.socket) -> bytes | None:
    """Read one message; None after the last one."""
    header = _read_exactly(sock, _LENGTH.size)
    return None if header is None else _read_exactly(sock, _LENGTH.unpack(header)[0])


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        with suppress(ConnectionError):
            if part := sock.recv(size - len(data)):
                data += part
                continue
        return None
    return bytes(data)


def _send_frame(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(body)) + body)


class RankGroup:
    """Sums over the ranks. `is_ordered`: add up in the order of the ranks, whatever the number of tokens."""

    def __init__(self, rank: int, size: int, store: str, *, is_ordered: bool) -> None:
        self.rank, self.size = rank, size
        self._is_ordered = is_ordered
        self._store = store
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LOAD_TIMEOUT_S)
        self._group = gloo(_distributed.FileStore(store, size), rank, size, options)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, equal to the bit on all ranks. May overwrite `x`."""
        x = x.contiguous()
        if not self._is_ordered:
            self._group.allreduce([x]).wait()
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def smallest(self, capacity: KVCapacity) -> KVCapacity:
        """Return the capacity that all ranks have; `kv_bytes` counts the pages of all of them."""
        counts = torch.tensor([capacity.num_pages, capacity.num_host_pages])
        options = _distributed.AllreduceOptions()
        options.reduceOp = _distributed.ReduceOp.MIN
        self._group.allreduce([counts], options).wait()
        num_pages, num_host_pages = counts.tolist()
        kv_bytes = capacity.kv_bytes // capacity.num_pages * num_pages * self.size
        return replace(capacity, num_pages=num_pages, num_host_pages=num_host_pages, kv_bytes=kv_bytes)

    def start_serving(self) -> None:
        """Wait until all ranks have loaded; sums time out after `STEP_TIMEOUT_S` from then on."""
        self._group.barrier().wait()
        Path(self._store).unlink(missing_ok=True)  # all ranks are connected; an engine that is killed leaves no file
        self._group._set_default_timeout(timedelta(seconds=STEP_TIMEOUT_S))

    def sum_outputs(self, linear: Linear) -> Linear:
        """Return a layer divided by inputs, whose outputs are summed over the ranks."""
        return lambda x: self.sum(linear(x))


class RankProcesses:
    """The other ranks, as child processes of rank 0."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self._store = Path(tempfile.gettempdir()) / f"chatcache-ranks-{uuid4().hex}"
        self._children: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        try:
            for rank in range(1, size):
                self._start(RankStart(config, rank, str(self._store)))
            self._wait_ready()
            self.group = RankGroup(0, size, str(self._store), is_ordered=config.deterministic)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Return the process ids of ranks 1, 2, ..."""
        return [child.pid for child in self._children]

    def _start(self, start: RankStart) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(STEP_TIMEOUT_S)
        self._sockets.append(ours)
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-c", RANK_PROGRAM, str(fd)]
            self._children.append(subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL))
        with suppress(ConnectionError):  # the rank has ended, as `_wait_ready` will find
            _send_frame(ours, msgspec.msgpack.encode(start))

    def _wait_ready(self) -> None:
        """Wait until all ranks are about to connect. Connecting takes LOAD_TIMEOUT_S to miss a rank that has ended.

        Raises: DeviceLostError if a rank ends before.
        """
        for sock in self._sockets:
            sock.settimeout(LOAD_TIMEOUT_S)
            if read_frame(sock) is None:
                raise DeviceLostError(f"tensor parallel: {self.describe(EOFError('a rank has ended'))}")
            sock.settimeout(STEP_TIMEOUT_S)

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Send a plan to the other ranks; rank 0 runs it in the block.

        Raises: DeviceLostError if sending or the block fails; the other ranks were killed then.
        """
        try:
            body = encode_plan(plan)
            for sock in self._sockets:
                _send_frame(sock, body)
            yield
        except Exception as error:
            reason = self.describe(error)
            for child in self._children:
                child.kill()  # a stopped rank keeps its memory, and cannot notice that rank 0 ends
            raise DeviceLostError(f"tensor parallel: step {plan.step} failed: {reason}") from error

    def check(self) -> None:
        """Raise DeviceLostError if a rank has ended."""
        if (ended := self._ended()) is not None:
            raise DeviceLostError(f"tensor parallel: {ended}")

    def describe(self, error: BaseException) -> str:
        """Return which rank has ended, else the error."""
        deadline = time.monotonic() + 1.5  # a connection may be closed a moment before the process has ended
        while time.monotonic() < deadline:
            if (ended := self._ended()) is not None:
                return ended
            time.sleep(0.02)
        return str(error)

    def _ended(self) -> str | None:
        """Return which rank has ended, and its exit status."""
        for rank, child in enumerate(self._children, 1):
            if (status := child.poll()) is not None:
                return f"rank {rank} (process {child.pid}) ended with status {status}"
        return None

    def close(self) -> None:
        """End the other ranks."""
        for sock in self._sockets:
            sock.close()
        for child in self._children:
            try:
                child.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._store.unlink(missing_ok=True)


def read_start(sock: socket.socket) -> RankStart:
    """Read the first message to a rank. Raises: EOFError if rank 0 has ended."""
    body = read_frame(sock)
    if body is None:
        raise EOFError("rank 0 has ended")
    return msgspec.msgpack.decode(body, type=RankStart)


def send_ready(sock: socket.socket) -> None:
    """Report to rank 0 that this rank is about to connect. Raises: ConnectionError if rank 0 has ended."""
    _send_frame(sock, b"")


def end_with_rank_0(sock: socket.socket) -> None:
    """End this process when rank 0 ends, even while this rank loads or waits for another one.

    `sock`: this rank's end of the socket pair.
    """
    poll = select.poll()
    poll.register(sock, 0)  # reports that the other end was closed, but no messages

    def wait() -> None:
        poll.poll()
        os._exit(0)

    threading.Thread(target=wait, name="chatcache-rank-0", daemon=True).start()


def check_tensor_parallel(size: int, arch: Architecture, where: Path) -> None:
    """Verify that a model's layers can be divided among `size` ranks.

    Raises: ModelFolderError naming the field that cannot be divided.
    """
    for name, count in (("num_attention_heads", arch.num_heads), ("intermediate_size", arch.intermediate_size)):
        if count % size:
            raise ModelFolderError(f"{where}: tensor_parallel_size {size} does not divide {name} {count}")
    if arch.num_kv_heads % size and size % arch.num_kv_heads:
        raise ModelFolderError(
            f"{where}: tensor_parallel_size {size} neither divides num_key_value_heads {arch.num_kv_heads} "
            "nor is a multiple of it"
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one rank in the layers of `arch`, an architecture that `check_tensor_parallel` accepts."""

    arch: Architecture
    rank: int
    size: int

    @property
    def local(self) -> Architecture:
        """Return the architecture of this rank's layers."""
        a = self.arch
        num_kv_heads = max(1, a.num_kv_heads // self.size)
        width = a.intermediate_size // self.size
        return replace(a, num_heads=a.num_heads // self.size, num_kv_heads=num_kv_heads, intermediate_size=width)

    def _query(self) -> Span:
        width = self.arch.num_heads * self.arch.head_dim // self.size
        return self.rank * width, (self.rank + 1) * width

    def _key(self) -> Span:
        num_local = self.local.num_kv_heads
        first = self.rank * self.arch.num_kv_heads // self.size
        return first * self.arch.head_dim, (first + num_local) * self.arch.head_dim

    def _inner(self) -> Span:
        width = self.arch.intermediate_size // self.size
        return self.rank * width, (self.rank + 1) * width

    def outputs(self, projection: str) -> tuple[int, list[Span]] | None:
        """Return the number of outputs of a projection and those of this rank; None if it has all of them."""
        a = self.arch
        query, key, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size
        match projection:
            case "q_proj":
                return query, [self._query()]
            case "k_proj" | "v_proj":
                return key, [self._key()]
            case "gate_proj" | "up_proj":
                return inner, [self._inner()]
            case "qkv_proj":
                keys = [(first + shift, end + shift) for shift in (query, query + key) for first, end in [self._key()]]
                return query + 2 * key, [self._query(), *keys]
            case "gate_up_proj":
                first, end = self._inner()
                return 2 * inner, [(first, end), (first + inner, end + inner)]
        return None

    def inputs(self, projection: str) -> tuple[int, Span] | None:
        """Return the number of inputs of a projection and those of this rank; None if it has all of them."""
        if projection == "o_proj":
            return self.arch.num_heads * self.arch.head_dim, self._query()
        return (self.arch.intermediate_size, self._inner()) if projection == "down_proj" else None


class RankWeights:
    """The tensors of one rank: of every divided tensor only this rank's part is read. Satisfies `WeightSource`."""

    def __init__(self, weights: WeightSource, shard: Shard) -> None:
        self._weights, self._shard = weights, shard
        self.num_parameters = weights.num_parameters

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return this rank's part of a tensor, of the given shape. Raises: as `WeightSource.get`."""
        projection, _, kind = name.rpartition(".")
        projection = projection.rpartition(".")[2]
        if (outputs := self._shard.outputs(projection)) is not None:
            count, spans = outputs
            pick = _pick_rows(spans)
            return self._weights.get(name, (count, *shape[1:]), pick)
        if (inputs := self._shard.inputs(projection)) is not None:
            if kind == "bias":  # added once, by rank 0
                whole = self._weights.get(name, shape)
                return whole if self._shard.rank == 0 else torch.zeros_like(whole)
            count, (first, end) = inputs
            return self._weights.get(name, (shape[0], count), lambda tensor: tensor[:, first:end])
        return self._weights.get(name, shape, part)

    def digest(self) -> str:
        """Return the digest of the whole model's tensors."""
        return self._weights.digest()


def _pick_rows(spans: list[Span]) -> Part:
    def pick(tensor: Tensor) -> Tensor:
        parts = [tensor[first:end] for first, end in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return pick


class NoSampler:
    """Draws nothing: the sampler of all ranks but the first. Satisfies `TokenSampler` and `PromptScorer`."""

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Do nothing."""

    def sample(self, logits: Tensor, index: NDArray[np.intp], draws: Draws) -> StepResult:
        """Return a result without draws."""
        return _no_draws()

    def enqueue(
        self,
        logits: Tensor,
        index: NDArray[np.intp],
        draws: Draws,
        slots: I32 | None = None,
        last: Tensor | None = None,
    ) -> CompletedDraws:
        """Return a result without draws."""
        return CompletedDraws(_no_draws())

    def prompt_scorer(self, rows: Rows, scores: Scores) -> NoSampler:
        """Return a scorer that scores nothing."""
        return self

    def fill(self, logits: Tensor) -> None:
        """Do nothing."""

    def add_to(self, result: StepResult) -> StepResult:
        """Return the result as it is."""
        return result


def _no_draws() -> StepResult:
    ids, logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    return StepResult(ids, logprobs, ids, logprobs)


def no_head(hidden_states: Tensor) -> Tensor:
    """Return logits of no token at all, [N, 0]: the output head of all ranks but the first."""
    return hidden_states[:, :0]
