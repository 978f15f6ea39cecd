"""Attention backends and the interface between networks and KV pages.

A backend (`reference`, `cpu` or `triton`) is a module of `chatcache_kernels`; all have the same functions, which
`chatcache_kernels.reference` documents. A network attends through one `AttentionStep` per step.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from chatcache_kernels.experts import Activation, Allocate, ExpertWeights, empty
from chatcache_kernels.types import (
    AttentionBatch,
    AttentionWork,
    HeadNorms,
    HostPages,
    KVPages,
    LatentPages,
    PageStore,
)
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.geometry import Geometry, LayerPlace, StoreShape
from chatcache.model.states import StateStep
from chatcache.types.plan import I32

log = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "triton")
DETERMINISTIC_BACKENDS = ("cpu", "triton")  # each has a module `batch_invariant`
MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
KV_CACHE_DTYPES = ("auto", "fp8")


class AttentionBackend(Protocol):
    """Functions that every kernel module has. Shapes as in `chatcache_kernels.reference`."""

    def allocate_pages(
        self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPages: ...

    def write_pages(self, pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None: ...

    def copy_pages(self, pages: PageStore, copies: Tensor) -> None: ...

    def swap_out(self, pages: PageStore, host: HostPages, swaps: Tensor) -> None: ...

    def swap_in(self, pages: PageStore, host: HostPages, swaps: Tensor) -> None: ...

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

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        slots: Tensor,
        offsets: Tensor,
        activation: str | None,
    ) -> Tensor: ...

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor,
        slots: Tensor,
        offsets: Tensor,
        scale: float,
        l2_norm: bool,
    ) -> Tensor: ...

    def ssd_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        states: Tensor,
        slots: Tensor,
        offsets: Tensor,
    ) -> Tensor: ...

    def allocate_latent_pages(
        self, num_layers: int, num_pages: int, page_size: int, width: int, rank: int, dtype: torch.dtype
    ) -> LatentPages: ...

    def write_latents(self, pages: LatentPages, layer: int, latents: Tensor, slots: Tensor) -> None: ...

    def read_latents(self, pages: LatentPages, layer: int, slots: Tensor) -> Tensor: ...

    def latent_attention(
        self, q: Tensor, pages: LatentPages, layer: int, batch: AttentionBatch, scale: float
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def clamped_silu_mul(self, gate_up: Tensor, slope: float, limit: float) -> Tensor: ...

    def pack_experts(
        self, weight: Tensor, bias: Tensor | None, *, is_int8: bool = False, allocate: Allocate = empty
    ) -> ExpertWeights: ...

    def grouped_experts(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        up: ExpertWeights,
        down: ExpertWeights,
        activate: Activation,
    ) -> Tensor: ...

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
    """The attention batches of one step, the page stores that it reads and writes, and the kernels.

    `batches`: one per `Geometry.forms`, with the same tokens; `places`: those of the geometry.
    """

    kernels: AttentionBackend
    stores: tuple[PageStore, ...]
    batches: tuple[AttentionBatch, ...]
    places: tuple[LayerPlace | None, ...]
    states: StateStep | None = None

    @property
    def pages(self) -> KVPages:
        """Return the store of a network whose layers are all alike."""
        return self.stores[0]  # type: ignore[return-value]

    @property
    def batch(self) -> AttentionBatch:
        """Return the batch of a network whose layers are all alike."""
        return self.batches[0]

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
        """Write k and v to their pages, unless the layer reads those of another, and return the attention of q.

        Shapes: q [T, H, D], k, v [T, Hkv, D] -> [T, H, D].
        """
        place = self._place(layer)
        pages, batch = cast(KVPages, self.stores[place.store]), self.batches[place.form]
        if place.has_own_kv:
            self.kernels.write_pages(pages, place.index, k, v, batch.slots)
        return self.kernels.paged_attention(q, pages, place.index, batch, scale, window, softcap, sinks)

    def rope_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        *,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Normalise heads if asked, apply the rotary embedding, and attend as `attend` of a layer with its own KV.

        Shapes: as `attend`; cos, sin [T, rotary_dim / 2].
        """
        place = self._place(layer)
        pages, batch = cast(KVPages, self.stores[place.store]), self.batches[place.form]
        q = self.kernels.rope_write(q, k, v, cos, sin, pages, place.index, batch.slots, norms)
        return self.kernels.paged_attention(q, pages, place.index, batch, scale, window, softcap, sinks)

    def latent_place(self, layer: int) -> tuple[LatentPages, int, AttentionBatch]:
        """Return the store, the index in that store, and the batch of a layer with latent attention."""
        place = self._place(layer)
        return cast(LatentPages, self.stores[place.store]), place.index, self.batches[place.form]

    def _place(self, layer: int) -> LayerPlace:
        place = self.places[layer]
        if place is None:
            raise ValueError(f"layer {layer} has no page store")
        return place


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

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        """Run one step without the output head; return the final hidden states of the tokens `wanted` (indices).

        Requires `geometry.hidden_size`.
        Shapes: tokens, positions [T] int64, wanted [N] int64 -> [N, hidden].
        """
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of final hidden states, which `hidden_states` returned. Shapes: [N, hidden] -> [N, V]."""
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
    if deterministic and name not in DETERMINISTIC_BACKENDS:
        needed = " or ".join(map(repr, DETERMINISTIC_BACKENDS))
        raise ModelFolderError(f"deterministic needs the attention backend {needed}, and on {device} that is {name!r}")
    module = f"{name}.batch_invariant" if deterministic else name
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


def check_kv_cache_dtype(name: str, backend: str, device: torch.device) -> None:
    """Check a `kv_cache_dtype`, auto (as the model computes) | fp8, before the model is loaded.

    Raises: ModelFolderError for another one, or if the attention backend or the device does not have it.
    """
    if name not in KV_CACHE_DTYPES:
        raise ModelFolderError(f"kv_cache_dtype {name!r} is not supported; choose {' or '.join(KV_CACHE_DTYPES)}")
    if name == "auto":
        return
    problem = ""
    if backend == "cpu":
        problem = "is for GPUs: the CPU kernels read keys and values in the dtype of the model"
    elif device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        problem = f"needs compute capability 8.9, and {device} has {capability[0]}.{capability[1]}"
    if problem:
        raise ModelFolderError(f"kv_cache_dtype {name!r} {problem}; choose auto")


def allocate_stores(
    kernels: AttentionBackend, geometry: Geometry, num_pages: int, page_size: int
) -> tuple[PageStore, ...]:
    """Allocate the page stores of a network on its device."""

    def allocate(store: StoreShape) -> PageStore:
        kv, count = store.kv, store.num_layers
        if kv.rank is not None:
            return kernels.allocate_latent_pages(count, num_pages, page_size, kv.head_dim, kv.rank, geometry.dtype)
        return kernels.allocate_pages(count, num_pages, page_size, kv.num_kv_heads, kv.head_dim, geometry.page_dtype)

    with torch.device(geometry.device):
        return tuple(map(allocate, geometry.stores))


def _exists(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
