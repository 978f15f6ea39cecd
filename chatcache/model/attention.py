"""Attention backends and the interface between networks and KV pages.

A backend (`reference`, `cpu` or `triton`) is a module of `chatcache_kernels`; all have the same functions, which
`chatcache_kernels.reference` documents. A network attends through one `AttentionStep` per step.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from chatcache_kernels.types import AttentionBatch, AttentionWork, HeadNorms, HostPages, KVPages
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.types.plan import I32

log = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "triton")
MIN_CAPABILITY = (8, 0)


class AttentionBackend(Protocol):
    """Functions that every kernel module has. Shapes as in `chatcache_kernels.reference`."""

    def allocate_pages(
        self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPages: ...

    def write_pages(self, pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None: ...

    def copy_pages(self, pages: KVPages, copies: Tensor) -> None: ...

    def swap_out(self, pages: KVPages, host: HostPages, swaps: Tensor) -> None: ...

    def swap_in(self, pages: KVPages, host: HostPages, swaps: Tensor) -> None: ...

    def prepare(self, tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork | None: ...

    def paged_attention(
        self,
        q: Tensor,
        pages: KVPages,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        pages: KVPages,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's attention batch, the KV pages that it reads and writes, and the kernels."""

    kernels: AttentionBackend
    pages: KVPages
    batch: AttentionBatch

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k and v to their pages, and return the attention of q.

        Shapes: q [T, H, D], k, v [T, Hkv, D] -> [T, H, D].
        """
        self.kernels.write_pages(self.pages, layer, k, v, self.batch.slots)
        return self.kernels.paged_attention(q, self.pages, layer, self.batch, scale, window, softcap, sinks)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a network that determine its KV pages and its logits.

    `hidden_size`: of the final hidden states, 0 if the network cannot return them.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    hidden_size: int = 0

    @property
    def group(self) -> int:
        """Return how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page: keys and values of all layers."""
        return 2 * self.num_layers * page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Network(Protocol):
    """A causal language model that attends through an `AttentionStep`."""

    @property
    def geometry(self) -> Geometry: ...

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Run one step and return logits.

        `drawn` are the indices of the tokens whose logits are needed; None means all tokens, and only captured steps
        pass it.
        Shapes: tokens, positions [T] int64, drawn [U] int64 -> [U, V].
        """
        ...

    def forward_parts(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Run one step and yield the logits of one part of its tokens after the other.

        `parts`: indices of the tokens of each part. The logits of two parts are never in memory at the same time.
        """
        ...

    def forward_states(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, pooled: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run one step; return the final hidden states of the tokens `pooled`, and the logits of `drawn`.

        Requires `geometry.hidden_size`. The logits are None if no token is drawn.
        Shapes: tokens, positions [T] int64, pooled [N] int64, drawn [U] int64 -> [N, hidden], [U, V].
        """
        ...


def choose_backend(name: str, device: torch.device, *, deterministic: bool = False) -> tuple[str, AttentionBackend]:
    """Return the name and the kernel module of a backend.

    `name`: auto | reference | cpu | triton;
    auto selects cpu on CPUs, triton on GPUs that Triton compiles for, and reference otherwise.
    Raises: ModelFolderError for a backend that this device or installation does not have, or that does not support
    `deterministic`.
    """
    if name not in BACKENDS:
        raise ModelFolderError(f"attention backend {name!r} does not exist; choose {' or '.join(BACKENDS)}")
    if name == "auto":
        name = _best_backend(device)
    problem = _problem(name, device)
    if problem:
        raise ModelFolderError(f"attention backend {name!r} {problem}; choose auto")
    if deterministic and name != "cpu":
        raise ModelFolderError(f"deterministic needs the attention backend 'cpu', and on {device} that is {name!r}")
    module = "cpu.batch_invariant" if deterministic else name
    return name, cast(AttentionBackend, importlib.import_module(f"chatcache_kernels.{module}"))


def _best_backend(device: torch.device) -> str:
    best = "cpu" if device.type == "cpu" else "triton"
    problem = _problem(best, device)
    if problem:
        log.warning("attention backend %r %s: using 'reference', which is slow", best, problem)
        return "reference"
    return best


def _problem(name: str, device: torch.device) -> str:
    """Return the reason why a backend cannot be used on this device, "" if it can."""
    if not _exists(f"chatcache_kernels.{name}"):
        return "is not installed"
    if name == "cpu" and device.type != "cpu":
        return f"does not run on {device}"
    if name != "triton":
        return ""
    if not _exists("triton"):
        return "needs the package triton, which is not installed"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else f"runs on {device} under TRITON_INTERPRET=1 only"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= MIN_CAPABILITY else f"needs compute capability 8.0, and {device} has {capability}"


def allocate_kv_pages(kernels: AttentionBackend, geometry: Geometry, num_pages: int, page_size: int) -> KVPages:
    """Allocate the KV pages of a network on its device."""
    with torch.device(geometry.device):
        return kernels.allocate_pages(
            geometry.num_layers, num_pages, page_size, geometry.num_kv_heads, geometry.head_dim, geometry.dtype
        )


def _exists(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
