"""Run a decode step of a whole pre-norm decoder (Llama, Mistral, Qwen) in one launch.

Each layer is nine or ten kernel calls of a `KernelQueue` over buffers at fixed addresses. Values that change every step
(the number of tokens, the tables of their pages) are written into the jobs before the queue runs. The kernels are those
of the other modules. Activations are bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import AttentionBatch, HeadNorms, KVPages
from . import attention_decode, attention_shared, fused, int8, int16, matmul, megakernel, rope
from .attention_decode import MAX_DECODE_QUERIES, decode_fields, register_lanes
from .attention_shared import shared_fields
from .launch import Launch
from .megakernel import KernelCalls, KernelQueue
from .simd import BFLOAT16

MAX_TOKENS = 64  # of a step, and rows of the buffers; oneDNN is faster for more (measured)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights of a linear layer.

    Shapes: weight as returned by `matmul.pack_weight`, bias [out]. With scales [out], weight is as returned by
    `int8.pack_numbers` for the unit of bf16 activations and bias is float32. `compact`: a copy of a weight without
    scales, see the module of that name.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    compact: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs, including padding."""
        return self.weight.shape[0] * matmul.PANEL

    @property
    def num_inputs(self) -> int:
        """Return the number of inputs, including padding."""
        return self.weight.shape[1] * matmul.PANEL


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder block.

    Outputs of `qkv`: query heads, key heads, value heads; of `gate_up`: gate, then up.
    """

    attention_norm: Tensor
    qkv: PackedLinear
    head_norms: HeadNorms | None
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a model.

    Shapes: embedding [vocab_size, hidden], cos, sin [max_positions, rotary_dim / 2] float32, norm [hidden].
    """

    embedding: Tensor
    cos: Tensor
    sin: Tensor
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: PackedLinear
    eps: float
    scale: float
    num_heads: int

    @property
    def scratch_bytes(self) -> int:
        """Return the scratch bytes that a thread needs for the largest matrix product."""
        panels = [self.head, *(x for each in self.layers for x in (each.qkv, each.out, each.gate_up, each.down))]
        widest = max([int8.scratch_bytes(each.num_inputs) for each in panels if each.scales is not None], default=0)
        most = max(matmul.scratch_bytes(each.num_inputs) for each in panels)
        return max(most, widest, int16.SUMS_BYTES)

    @property
    def quantises_activations(self) -> bool:
        """Return whether the layers multiply activations quantised to int16."""
        return self.head.scales is not None and int8.choose_unit(torch.bfloat16) == "int16"

    def is_supported(self, pages: KVPages) -> bool:
        """Return whether every kernel supports these shapes and dtypes."""
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


class MegakernelDecoder:
    """Runs decode steps of up to `max_tokens` tokens, each in one launch. Not thread-safe."""

    def __init__(self, weights: DecoderWeights, pages: KVPages) -> None:
        """Build the kernel call queues. Raises: ValueError for shapes that `is_supported` rejects."""
        if not weights.is_supported(pages):
            raise ValueError("this model's shapes need torch in every layer")
        self.max_tokens = MAX_TOKENS
        self._weights, self._pages = weights, pages
        self._num_threads = torch.get_num_threads()
        self._few = max(1, MAX_DECODE_QUERIES * pages.num_kv_heads // weights.num_heads)
        self._buffers = _Buffers.of(weights, pages, self.max_tokens)
        self._counts = (0, 0, 0)  # tokens, logits and picked tokens of the previous step
        self._build()

    def can_run(self, batch: AttentionBatch, num_tokens: int) -> bool:
        """Return whether a step has few enough tokens, in total and in each row."""
        return 0 < num_tokens <= self.max_tokens and batch.max_new_tokens <= self._few

    def run(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, drawn: Tensor | None) -> Tensor:
        """Run the model on the step's tokens and return the logits of the tokens `drawn` (indices).

        The tokens' keys and values are written to their pages.
        Shapes: tokens, positions [num_tokens], drawn [num_drawn] int64 (None: all) -> [num_drawn, vocab_size] bf16.
        Raises: IndexError for token ids or positions out of range.
        """
        drawn = torch.arange(len(tokens)) if drawn is None else drawn
        return self._run(tokens, positions, batch, drawn, len(drawn))

    def run_states(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, pooled: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the model; return the final hidden states of the tokens `pooled`, and the logits of `drawn`.

        No token is in both. Shapes: as `run`, pooled [num_pooled] -> [num_pooled, hidden], [num_drawn, vocab_size].
        """
        logits = self._run(tokens, positions, batch, torch.cat((drawn, pooled)), len(drawn))
        states = self._buffers.h[len(drawn) : len(drawn) + len(pooled)].clone()
        return states, logits

    def _run(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, picked: Tensor, num_logits: int) -> Tensor:
        """Run the last layer's end for the tokens `picked`, and the output head for the first `num_logits` of them."""
        _check_indices(tokens, len(self._weights.embedding), "token")
        _check_indices(positions, len(self._weights.cos), "position")
        logits = torch.empty(num_logits, self._weights.head.num_outputs, dtype=torch.bfloat16)
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
        self._pick.set(rows=picked.data_ptr(), num_rows=len(picked))
        if (len(tokens), num_logits, len(picked)) != self._counts:  # usually as many as in the previous step
            self._set_counts(len(tokens), num_logits, len(picked))
        self._head.set(out=logits.data_ptr())
        program.run(threads)
        return logits

    def _set_counts(self, num_tokens: int, num_logits: int, num_picked: int) -> None:
        """Set how many tokens each kernel call computes."""
        self._counts = num_tokens, num_logits, num_picked
        for jobs, name, every in self._counted:
            num_last = num_logits if jobs is self._head else num_picked
            counts = np.full(len(jobs.records), num_tokens)
            counts[len(counts) - every :] = num_last
            jobs.set(**{name: counts})
            if "configs" in (jobs.records.dtype.names or ()):  # of AMX
                configs = matmul.tile_configs(num_tokens), matmul.tile_configs(num_last)
                jobs.set(
                    configs=np.where(np.arange(len(counts)) < len(counts) - every, *(c.data_ptr() for c in configs))
                )

    def _build(self) -> None:
        """Fill the kernel arguments that do not change between steps, and build the call queues."""
        w, b, count = self._weights, self._buffers, len(self._weights.layers)
        hidden, layers = w.norm.shape[0], self._weights.layers
        self._embed = self._rows(w.embedding, b.x)
        self._turn = self._rows(w.cos, b.cos, w.sin, b.sin)
        self._pick = self._rows(b.mixed, b.mixed_drawn, b.x, b.x_drawn)
        self._rope = self._rope_jobs()
        lanes = register_lanes(self._pages.page_size, self._pages.head_dim)
        self._attend_rows = self._attention_jobs(
            attention_decode.decode_kernel(BFLOAT16, lanes), attention_decode.DECODE_JOB
        )
        self._attend_shared = self._attention_jobs(
            attention_shared.shared_kernel(BFLOAT16, lanes), attention_shared.SHARED_JOB
        )
        norms = [layers[0].attention_norm]
        for index, layer in enumerate(layers):
            norms += [layer.mlp_norm, layers[index + 1].attention_norm if index + 1 < count else w.norm]
        quantises = w.quantises_activations
        norm = KernelCalls(
            fused.norm_kernel(BFLOAT16, quantises), fused.NORM_JOB, len(norms), x=b.y.data_ptr(), out=b.h.data_ptr(),
            residual=b.x.data_ptr(), total=b.x.data_ptr(), quantised=b.quantised.data_ptr(),
            weight=[each.data_ptr() for each in norms], width=hidden, rows_per_item=1, eps=w.eps,
        )  # fmt: skip
        norm.records[0]["x"], norm.records[0]["residual"], norm.records[0]["total"] = b.x.data_ptr(), 0, 0
        for name in ("residual", "total"):
            norm.records[name][-2:] = b.x_drawn.data_ptr()
        silu = KernelCalls(
            fused.activation_kernel(BFLOAT16, quantise=quantises), fused.ACTIVATION_JOB, count,
            gate_up=b.gates.data_ptr(), out=b.gated.data_ptr(), quantised=b.quantised.data_ptr(),
            width=b.gated.shape[1], rows_per_item=1,
        )  # fmt: skip
        quantise = KernelCalls(
            int16.quantise_kernel(), int16.QUANTISE_JOB, count, x=b.mixed.data_ptr(), out=b.quantised.data_ptr(),
            num_inputs=b.mixed.shape[1], tokens_per_item=1,
        ) if quantises else None  # fmt: skip
        qkv = self._linear([layer.qkv for layer in layers], b.h, b.qkv)
        out = self._linear([layer.out for layer in layers], b.mixed, b.y)
        (out if quantise is None else quantise).records["x"][-1] = b.mixed_drawn.data_ptr()
        gate_up = self._linear([layer.gate_up for layer in layers], b.h, b.gates)
        down = self._linear([layer.down for layer in layers], b.gated, b.y)
        self._head = self._linear([w.head], b.h, b.h)

        def order(attend: KernelCalls) -> KernelQueue:
            """Return the queue of kernel calls of one step, with one of the two attention kernels."""
            steps = [(self._embed, 0), (self._turn, 0), (self._turn, 1), (norm, 0)]
            for index in range(count):
                steps += [(qkv, index), (self._rope, index), (attend, index)]
                steps += [(self._pick, 0), (self._pick, 1)] if index == count - 1 else []
                steps += [(quantise, index)] if quantise is not None else []
                steps += [(out, index), (norm, 2 * index + 1), (gate_up, index), (silu, index)]
                steps += [(down, index), (norm, 2 * index + 2)]
            return KernelQueue([*steps, (self._head, 0)])

        self._by_rows, self._by_shared = order(self._attend_rows), order(self._attend_shared)
        # calls, the field that counts tokens, and how many of the last records count drawn tokens
        self._counted = [
            (qkv, "num_tokens", 0), (out, "num_tokens", 1), (gate_up, "num_tokens", 1), (down, "num_tokens", 1),
            (self._head, "num_tokens", 1), (norm, "num_rows", 2), (silu, "num_rows", 1),
            *([(quantise, "num_tokens", 1)] if quantise is not None else []),
        ]  # fmt: skip

    def _rows(self, *pairs: Tensor) -> KernelCalls:
        """Return kernel calls that gather rows of tables into buffers.

        `pairs`: table, buffer, table, buffer, ...; one call for each pair.
        """
        sources, targets = pairs[::2], pairs[1::2]
        return KernelCalls(
            megakernel.gather_kernel(), megakernel.GATHER_JOB, len(sources),
            source=[each.data_ptr() for each in sources],
            out=[each.data_ptr() for each in targets],
            words=[each[0].numel() * each.element_size() // 8 for each in sources],
        )  # fmt: skip

    def _linear(self, panels: Sequence[PackedLinear], x: Tensor, out: Tensor) -> KernelCalls:
        """Return kernel calls that apply each of the layers `panels` to `x` and write to `out`."""
        layers: dict[str, Any] = {
            "weight": [each.weight.data_ptr() for each in panels],
            "bias": [each.bias.data_ptr() if each.bias is not None else 0 for each in panels],
            "num_inputs": [each.num_inputs for each in panels],
            "num_outputs": [each.num_outputs for each in panels],
        }
        scratch = self._buffers.scratch.data_ptr()
        launch, layout = matmul.multiply_kernel(), matmul.MATMUL_JOB
        if panels[0].scales is None:
            layers |= {"scratch_bytes_per_thread": self._weights.scratch_bytes, "num_threads": self._num_threads}
            layers["compact"] = [0 if each.compact is None else each.compact.data_ptr() for each in panels]
        else:
            layers["scales"] = [each.scales.data_ptr() for each in panels if each.scales is not None]
            if self._weights.quantises_activations:
                launch, layout, x = int16.multiply_kernel(), int16.MULTIPLY_JOB, self._buffers.quantised
                layers["blocks_per_item"] = int16.BLOCKS_PER_ITEM
            else:
                unit = int8.choose_unit(torch.bfloat16)
                launch, layout = int8.widening_kernel(torch.bfloat16, unit), int8.INT8_JOB
                layers |= {"groups_per_item": -(-self.max_tokens // matmul.GROUP_TOKENS), "panels_per_item": 1}
                layers["scratch_bytes_per_thread"] = self._weights.scratch_bytes
        return KernelCalls(launch, layout, len(panels), x=x.data_ptr(), out=out.data_ptr(), scratch=scratch, **layers)

    def _rope_jobs(self) -> KernelCalls:
        """Return the kernel calls for rotary embedding and page writes, one per layer."""
        w, b, pages = self._weights, self._buffers, self._pages
        dim, half, stride = pages.head_dim, w.cos.shape[1], b.qkv.shape[1]
        norms = [layer.head_norms for layer in w.layers]
        first = b.qkv.data_ptr()
        return KernelCalls(
            rope.rope_kernel(BFLOAT16, rope.register_lanes(dim, half)), rope.ROPE_JOB, len(w.layers), q=first,
            k=first + 2 * w.num_heads * dim, v=first + 2 * (w.num_heads + pages.num_kv_heads) * dim,
            out=b.q.data_ptr(), cos=b.cos.data_ptr(), sin=b.sin.data_ptr(),
            **_page_addresses(pages, "k_pages", "v_pages"),
            q_norm=[norm.q.data_ptr() if norm else 0 for norm in norms],
            k_norm=[norm.k.data_ptr() if norm else 0 for norm in norms], q_stride=stride, k_stride=stride,
            v_stride=stride, num_heads=w.num_heads, num_kv_heads=pages.num_kv_heads, head_dim=dim, half=half,
            page_size=pages.page_size, tokens_per_item=1, eps=norms[0].eps if norms[0] else 0.0,
        )  # fmt: skip

    def _attention_jobs(self, kernel: Launch, layout: np.dtype[np.void]) -> KernelCalls:
        """Return the calls of an attention kernel, one per layer; `layout`: dtype of its arguments."""
        w, b, pages = self._weights, self._buffers, self._pages
        return KernelCalls(
            kernel, layout, len(w.layers), q=b.q.data_ptr(), out=b.mixed.data_ptr(), kind=BFLOAT16,
            **_page_addresses(pages, "k", "v"), num_heads=w.num_heads, num_kv_heads=pages.num_kv_heads,
            head_dim=pages.head_dim, page_size=pages.page_size,
            window=[layer.window or 0 for layer in w.layers], scale=w.scale,
        )  # fmt: skip


def _check_indices(numbers: Tensor, end: int, what: str) -> None:
    """Raise IndexError unless all `numbers` are in 0 .. end - 1; `what` names them in the error."""
    values = numbers.numpy()
    if values.min() < 0 or values.max() >= end:
        raise IndexError(f"{what}s {values.min()} to {values.max()}: there are {end}")


def _page_addresses(pages: KVPages, k: str, v: str) -> dict[str, Any]:
    """Return the addresses of each layer's K and V pages, under the field names `k` and `v`."""
    steps = np.arange(pages.num_layers) * pages.k.stride(0) * pages.k.element_size()
    return {k: pages.k.data_ptr() + steps, v: pages.v.data_ptr() + steps}


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Activations of one layer, one row per token.

    Each layer overwrites those of the layer before.
    """

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
    quantised: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, weights: DecoderWeights, pages: KVPages, num_tokens: int) -> _Buffers:
        layer, hidden = weights.layers[0], weights.norm.shape[0]
        heads, gates, half = weights.num_heads * pages.head_dim, layer.gate_up.num_outputs, weights.cos.shape[1]
        widths = (hidden, hidden, hidden, layer.qkv.num_outputs, heads, heads, gates, gates // 2, hidden, heads)
        buffers = [torch.empty(num_tokens, width, dtype=torch.bfloat16) for width in widths]
        buffers += [torch.empty(num_tokens, half) for _ in range(2)]
        widest = int16.row_bytes(max(hidden, heads, gates // 2)) if weights.quantises_activations else 0
        buffers.append(torch.empty(num_tokens * widest, dtype=torch.uint8))
        buffers.append(torch.empty(torch.get_num_threads() * weights.scratch_bytes, dtype=torch.uint8))
        return cls(*buffers)
