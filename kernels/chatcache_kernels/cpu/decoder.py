"""A step of few tokens through a whole pre-norm decoder, in one launch: Llama, Mistral, Qwen2, Qwen3 and the like.

Each layer is nine jobs of a `Program` over buffers that stay where they are; what a step changes (how many tokens, and
where their pages are listed) is written into the jobs before it runs. The kernels are those of the other modules.

Symbols: see types.py; U drawn tokens, V vocabulary, C = rotated dimensions / 2. Activations are bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import AttentionBatch, HeadNorms, KVPages
from . import attention_decode, attention_shared, fused, int8, matmul, megakernel, rope
from .attention_decode import FEW_QUERIES, decode_fields, register_lanes
from .attention_shared import shared_fields
from .bf16 import has_amx
from .launch import Launch
from .megakernel import KernelCalls, KernelQueue
from .simd import BFLOAT16

MAX_TOKENS = 64  # of a step; more are better off with oneDNN (measured), and the buffers are this long
MAX_TOKENS_NO_TILES = 8  # the same on a CPU without AMX


@dataclass(frozen=True, slots=True)
class Panels:
    """A linear layer. Shapes: weight as `matmul.pack_weight` returns it, bias [out]; with scales [out], weight is as
    `codes.pack_numbers` returns it, and bias is float32."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0] * matmul.PANEL

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[1] * matmul.PANEL


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. `qkv` gives H query, Hkv key and Hkv value heads side by side; `gate_up` gate first."""

    attention_norm: Tensor
    qkv: Panels
    head_norms: HeadNorms | None
    out: Panels
    mlp_norm: Tensor
    gate_up: Panels
    down: Panels
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of a model. Shapes: embedding [V, hidden], cos, sin [positions, C] float32, norm [hidden]."""

    embedding: Tensor
    cos: Tensor
    sin: Tensor
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Panels
    eps: float
    scale: float
    num_heads: int

    @property
    def scratch_bytes(self) -> int:
        """Return what a thread needs for the largest product."""
        panels = [self.head, *(x for each in self.layers for x in (each.qkv, each.out, each.gate_up, each.down))]
        widest = max([int8.scratch_bytes(each.num_inputs) for each in panels if each.scales is not None], default=0)
        return max(4 * matmul.SCRATCH_FLOATS, widest)

    def fits(self, pages: KVPages) -> bool:
        """Tell whether every kernel takes these shapes without torch's help."""
        half, width = self.cos.shape[1], self.norm.shape[0]
        norms = [layer.head_norms for layer in self.layers if layer.head_norms is not None]
        return (
            pages.k.dtype == self.embedding.dtype == torch.bfloat16
            and register_lanes(pages.page_size, pages.head_dim) > 0
            and rope.register_lanes(pages.head_dim, half) > 0
            and half % 2 == 0
            and width % fused.LANES == 0
            and len(norms) in (0, len(self.layers))
        )


class FewTokens:
    """Runs steps of up to `max_tokens` tokens on one page store; not for two threads at once."""

    def __init__(self, weights: DecoderWeights, pages: KVPages) -> None:
        """Raises: ValueError for shapes that `fits` refuses."""
        if not weights.fits(pages):
            raise ValueError("this model's shapes need torch in every layer")
        one_form = weights.head.scales is not None
        self.max_tokens = MAX_TOKENS if has_amx() or one_form else MAX_TOKENS_NO_TILES
        self._weights, self._pages = weights, pages
        self._num_threads = torch.get_num_threads()
        self._few = max(1, FEW_QUERIES * pages.num_kv_heads // weights.num_heads)
        self._buffers = _Buffers.of(weights, pages, self.max_tokens)
        self._build()

    def takes(self, batch: AttentionBatch, num_tokens: int) -> bool:
        """Tell whether a step is short enough, in all and in each row."""
        return 0 < num_tokens <= self.max_tokens and batch.max_new_tokens <= self._few

    def run(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, drawn: Tensor | None) -> Tensor:
        """Write the tokens' keys and values and return logits of those at `drawn`, of all if None.

        Shapes: tokens, positions [T], drawn [U] int64 -> [U, V]. Raises: IndexError for numbers that name nothing.
        """
        _check(tokens, len(self._weights.embedding), "token")
        _check(positions, len(self._weights.cos), "position")
        if drawn is None:
            drawn = torch.arange(len(tokens))
        logits = torch.empty(len(drawn), self._weights.head.num_outputs, dtype=torch.bfloat16)
        threads = min(self._num_threads, torch.get_num_threads())
        if batch.work is None:
            attend, program = self._attend_rows, self._by_rows
            listed = decode_fields(batch, self._pages, self._weights.num_heads, threads)
        else:
            attend, program = self._attend_shared, self._by_shared
            listed = shared_fields(batch, batch.work, self._pages, self._weights.num_heads, threads)
        attend.set(**listed.fields)
        self._rope.set(slots=batch.slots.data_ptr(), num_tokens=len(tokens))
        self._embed.set(rows=tokens.data_ptr(), num_rows=len(tokens))
        self._turn.set(rows=positions.data_ptr(), num_rows=len(tokens))
        self._pick.set(rows=drawn.data_ptr(), num_rows=len(drawn))
        for jobs, name, every in self._counted:
            counts = np.full(len(jobs.records), len(tokens))
            counts[len(counts) - every :] = len(drawn)
            jobs.set(**{name: counts})
            if name == "num_tokens" and jobs is not self._rope:
                configs = matmul.tile_configs(len(tokens)), matmul.tile_configs(len(drawn))
                jobs.set(
                    configs=np.where(np.arange(len(counts)) < len(counts) - every, *(c.data_ptr() for c in configs))
                )
        self._head.set(out=logits.data_ptr())
        program.run(threads)
        return logits

    def _build(self) -> None:
        """Lay out the jobs, all but what a step changes, and their order."""
        w, b, count = self._weights, self._buffers, len(self._weights.layers)
        hidden, layers = w.norm.shape[0], self._weights.layers
        self._embed = self._rows(w.embedding, b.x)
        self._turn = self._rows(w.cos, b.cos, w.sin, b.sin)
        self._pick = self._rows(b.mixed, b.mixed_drawn, b.x, b.x_drawn)
        self._rope = self._rope_jobs()
        lanes = register_lanes(self._pages.page_size, self._pages.head_dim)
        self._attend_rows = self._attention_jobs(attention_decode.decode_kernel(BFLOAT16, lanes), attention_decode.JOB)
        self._attend_shared = self._attention_jobs(
            attention_shared.shared_kernel(BFLOAT16, lanes), attention_shared.JOB
        )
        norms = [layers[0].attention_norm]
        for index, layer in enumerate(layers):
            norms += [layer.mlp_norm, layers[index + 1].attention_norm if index + 1 < count else w.norm]
        norm = KernelCalls(
            fused.norm_kernel(BFLOAT16), fused.NORM_JOB, len(norms), x=b.y.data_ptr(), out=b.h.data_ptr(),
            residual=b.x.data_ptr(), total=b.x.data_ptr(), weight=[each.data_ptr() for each in norms], width=hidden,
            rows_each=1, eps=w.eps,
        )  # fmt: skip
        norm.records[0]["x"], norm.records[0]["residual"], norm.records[0]["total"] = b.x.data_ptr(), 0, 0
        for name in ("residual", "total"):
            norm.records[name][-2:] = b.x_drawn.data_ptr()
        silu = KernelCalls(
            fused.silu_kernel(BFLOAT16), fused.SILU_JOB, count, gate_up=b.gates.data_ptr(), out=b.gated.data_ptr(),
            width=b.gated.shape[1], rows_each=1,
        )  # fmt: skip
        qkv = self._linear([layer.qkv for layer in layers], b.h, b.qkv)
        out = self._linear([layer.out for layer in layers], b.mixed, b.y)
        out.records["x"][-1] = b.mixed_drawn.data_ptr()
        gate_up = self._linear([layer.gate_up for layer in layers], b.h, b.gates)
        down = self._linear([layer.down for layer in layers], b.gated, b.y)
        self._head = self._linear([w.head], b.h, b.h)

        def order(attend: KernelCalls) -> KernelQueue:
            steps = [(self._embed, 0), (self._turn, 0), (self._turn, 1), (norm, 0)]
            for index in range(count):
                steps += [(qkv, index), (self._rope, index), (attend, index)]
                steps += [(self._pick, 0), (self._pick, 1)] if index == count - 1 else []
                steps += [(out, index), (norm, 2 * index + 1), (gate_up, index), (silu, index)]
                steps += [(down, index), (norm, 2 * index + 2)]
            return KernelQueue([*steps, (self._head, 0)])

        self._by_rows, self._by_shared = order(self._attend_rows), order(self._attend_shared)
        # jobs, the field that counts tokens, and how many of the last records count drawn ones
        self._counted = [
            (qkv, "num_tokens", 0), (out, "num_tokens", 1), (gate_up, "num_tokens", 1), (down, "num_tokens", 1),
            (self._head, "num_tokens", 1), (norm, "num_rows", 2), (silu, "num_rows", 1),
        ]  # fmt: skip

    def _rows(self, *pairs: Tensor) -> KernelCalls:
        """Return jobs that copy rows of a table to a buffer, for each (table, buffer)."""
        sources, targets = pairs[::2], pairs[1::2]
        return KernelCalls(
            megakernel.gather_kernel(), megakernel.GATHER_JOB, len(sources),
            source=[each.data_ptr() for each in sources],
            out=[each.data_ptr() for each in targets],
            words=[each[0].numel() * each.element_size() // 8 for each in sources],
        )  # fmt: skip

    def _linear(self, panels: Sequence[Panels], x: Tensor, out: Tensor) -> KernelCalls:
        layers: dict[str, Any] = {
            "weight": [each.weight.data_ptr() for each in panels],
            "bias": [each.bias.data_ptr() if each.bias is not None else 0 for each in panels],
            "num_inputs": [each.num_inputs for each in panels],
            "num_outputs": [each.num_outputs for each in panels],
        }
        launch, layout = matmul.multiply_kernel(), matmul.JOB
        if panels[0].scales is not None:
            launch, layout = int8.multiply_kernel(torch.bfloat16), int8.JOB
            layers["scales"] = [each.scales.data_ptr() for each in panels if each.scales is not None]
            layers |= {"groups_each": -(-self.max_tokens // matmul.GROUP), "panels_each": 1}
            layers["scratch_each"] = self._weights.scratch_bytes
        scratch = self._buffers.scratch.data_ptr()
        return KernelCalls(launch, layout, len(panels), x=x.data_ptr(), out=out.data_ptr(), scratch=scratch, **layers)

    def _rope_jobs(self) -> KernelCalls:
        w, b, pages = self._weights, self._buffers, self._pages
        dim, half, stride = pages.head_dim, w.cos.shape[1], b.qkv.shape[1]
        norms = [layer.head_norms for layer in w.layers]
        first = b.qkv.data_ptr()
        return KernelCalls(
            rope.rope_kernel(BFLOAT16, rope.register_lanes(dim, half)), rope.JOB, len(w.layers), q=first,
            k=first + 2 * w.num_heads * dim, v=first + 2 * (w.num_heads + pages.num_kv_heads) * dim,
            out=b.q.data_ptr(), cos=b.cos.data_ptr(), sin=b.sin.data_ptr(), **_store(pages, "k_pages", "v_pages"),
            q_norm=[norm.q.data_ptr() if norm else 0 for norm in norms],
            k_norm=[norm.k.data_ptr() if norm else 0 for norm in norms], q_stride=stride, k_stride=stride,
            v_stride=stride, num_heads=w.num_heads, num_kv_heads=pages.num_kv_heads, head_dim=dim, half=half,
            page_size=pages.page_size, tokens_each=1, eps=norms[0].eps if norms[0] else 0.0,
        )  # fmt: skip

    def _attention_jobs(self, kernel: Launch, layout: np.dtype[np.void]) -> KernelCalls:
        w, b, pages = self._weights, self._buffers, self._pages
        return KernelCalls(
            kernel, layout, len(w.layers), q=b.q.data_ptr(), out=b.mixed.data_ptr(), kind=BFLOAT16,
            **_store(pages, "k", "v"), num_heads=w.num_heads, num_kv_heads=pages.num_kv_heads, head_dim=pages.head_dim,
            page_size=pages.page_size, window=[layer.window or 0 for layer in w.layers], scale=w.scale,
        )  # fmt: skip


def _check(numbers: Tensor, end: int, what: str) -> None:
    values = numbers.numpy()
    if values.min() < 0 or values.max() >= end:
        raise IndexError(f"{what}s {values.min()} to {values.max()}: there are {end}")


def _store(pages: KVPages, k: str, v: str) -> dict[str, Any]:
    """Return where each layer's pages lie, under two field names."""
    steps = np.arange(pages.num_layers) * pages.k.stride(0) * pages.k.element_size()
    return {k: pages.k.data_ptr() + steps, v: pages.v.data_ptr() + steps}


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Activations of one layer; each layer writes over the one before. A row is a token."""

    x: Tensor
    h: Tensor
    y: Tensor
    qkv: Tensor
    q: Tensor
    mixed: Tensor
    gates: Tensor
    gated: Tensor
    x_drawn: Tensor
    mixed_drawn: Tensor
    cos: Tensor
    sin: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, weights: DecoderWeights, pages: KVPages, num_tokens: int) -> _Buffers:
        layer, hidden = weights.layers[0], weights.norm.shape[0]
        heads, gates, half = weights.num_heads * pages.head_dim, layer.gate_up.num_outputs, weights.cos.shape[1]
        widths = (hidden, hidden, hidden, layer.qkv.num_outputs, heads, heads, gates, gates // 2, hidden, heads)
        buffers = [torch.empty(num_tokens, width, dtype=torch.bfloat16) for width in widths]
        buffers += [torch.empty(num_tokens, half) for _ in range(2)]
        buffers.append(torch.empty(torch.get_num_threads() * weights.scratch_bytes, dtype=torch.uint8))
        return cls(*buffers)
