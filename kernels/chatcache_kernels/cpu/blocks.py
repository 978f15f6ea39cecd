"""Run a decode step through the blocks of a model with several kinds of layers in one launch.

As `decoder`, for blocks x += mixer(norm(x)), x += mlp(norm(x)) of Qwen3.5, Qwen3-Next and Qwen3-MoE: the mixer is
attention with norms of the heads, or the gated delta rule; the MLP is gated, or experts chosen by a router. A layer is
ten to twenty kernel calls of a `KernelQueue` over buffers at fixed addresses. Activations are bf16.

A thread may enter a kernel after the others have left it (see `megakernel`), and must then find no work. So the number
of tiles of an expert layer, which its router decides, is kept until the end of the step: each layer has tiles of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..experts import ExpertWeights
from ..types import AttentionBatch, HeadNorms, KVPages
from . import attention_decode, attention_shared, experts, fused, matmul, megakernel, recurrent, rope
from .attention_decode import MAX_DECODE_QUERIES, decode_fields, register_lanes
from .attention_shared import shared_fields
from .decoder import MAX_TOKENS, PackedLinear
from .launch import Launch
from .megakernel import KernelCalls, KernelQueue
from .simd import BFLOAT16, KINDS


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of an attention layer. Outputs of `qkv`: queries, keys, values and, if any, gates of the outputs."""

    qkv: PackedLinear
    out: PackedLinear
    norms: HeadNorms
    num_heads: int
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer with the gated delta rule.

    Outputs of `projection`: queries, keys and values, as the convolution reads them, then z, b and a.
    Shapes: conv [C, K], conv_bias [C], decay, dt_bias [num_heads] float32, norm [dim_v].
    """

    projection: PackedLinear
    out: PackedLinear
    conv: Tensor
    conv_bias: Tensor | None
    has_silu: bool
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    num_key_heads: int
    num_heads: int
    dim_k: int
    dim_v: int

    @property
    def lanes(self) -> int:
        """Return the register width of the recurrence, 0 if a kernel does not support the shapes."""
        fits = recurrent.can_convolve(self.conv) and self.dim_v % fused.LANES == 0
        fits = fits and self.num_heads % recurrent.GATE_LANES == 0 and self.norm.dtype in KINDS
        return recurrent.delta_lanes(self.dim_k, self.dim_v) if fits else 0


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """Weights of a gated MLP. Outputs of `gate_up`: gate, then up."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """Weights of experts in panels, their router, and an expert of all tokens. Shapes: shared_gate [hidden]."""

    router: PackedLinear
    up: ExpertWeights
    down: ExpertWeights
    num_chosen: int
    is_normalised: bool
    shared: MLPWeights | None = None
    shared_gate: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of one block. Shapes: mixer_norm, mlp_norm [hidden]."""

    mixer_norm: Tensor
    mixer: AttentionWeights | DeltaWeights
    mlp_norm: Tensor
    mlp: MLPWeights | ExpertsWeights


@dataclass(frozen=True, slots=True)
class StackWeights:
    """Weights of all blocks. `half`: rotated pairs of dimensions. Shapes: norm [hidden], of the final norm."""

    blocks: Sequence[BlockWeights]
    norm: Tensor
    eps: float
    half: int

    @property
    def attention(self) -> list[AttentionWeights]:
        """Return the attention layers in order."""
        return [block.mixer for block in self.blocks if isinstance(block.mixer, AttentionWeights)]

    @property
    def delta(self) -> list[DeltaWeights]:
        """Return the layers with the gated delta rule in order."""
        return [block.mixer for block in self.blocks if isinstance(block.mixer, DeltaWeights)]

    @property
    def max_inputs(self) -> int:
        """Return the most inputs of a linear layer, without those of experts."""
        layers = [each for w in self.attention for each in (w.qkv, w.out)]
        layers += [each for w in self.delta for each in (w.projection, w.out)]
        mlps = [block.mlp for block in self.blocks]
        routed = [mlp for mlp in mlps if isinstance(mlp, ExpertsWeights)]
        plain = [mlp for mlp in (*mlps, *(w.shared for w in routed)) if isinstance(mlp, MLPWeights)]
        layers += [each.router for each in routed] + [each for w in plain for each in (w.gate_up, w.down)]
        return max(each.num_inputs for each in layers)

    def is_supported(self, pages: KVPages) -> bool:
        """Return whether every kernel supports these shapes and dtypes."""
        attention, norms = self.attention, [self.norm]
        for block in self.blocks:
            norms += [block.mixer_norm, block.mlp_norm]
        return (
            pages.k.dtype == torch.bfloat16
            and len(attention) == pages.num_layers
            and len({(each.num_heads, each.scale, each.norms.q.dtype, each.norms.eps) for each in attention}) == 1
            and all(each.norms.q.dtype == each.norms.k.dtype and each.norms.q.dtype in KINDS for each in attention)
            and register_lanes(pages.page_size, pages.head_dim) > 0
            and rope.register_lanes(pages.head_dim, self.half) > 0
            and all(norm.dtype in KINDS and norm.is_contiguous() for norm in norms)
            and self.norm.shape[0] % fused.LANES == 0
            and all(each.lanes for each in self.delta)
        )


class _Group:
    """The calls of one kernel, and the field that holds the number of tokens, or a multiple of it."""

    def __init__(self, launch: Launch, layout: np.dtype[np.void], count: str) -> None:
        self.count = count
        self.factors: list[int] = []
        self._launch, self._layout = launch, layout
        self._fields: list[dict[str, Any]] = []

    def add(self, fields: dict[str, Any], factor: int) -> int:
        """Add a call; return its place."""
        self._fields.append(fields)
        self.factors.append(factor)
        return len(self._fields) - 1

    @cached_property
    def calls(self) -> KernelCalls:
        """Return all calls; none is added from then on."""
        calls = KernelCalls(self._launch, self._layout, len(self._fields))
        for place, fields in enumerate(self._fields):
            for name, value in fields.items():
                calls.records[place][name] = value.data_ptr() if isinstance(value, Tensor) else value
        return calls

    def set_tokens(self, num_tokens: int) -> None:
        """Set the number of tokens of all calls."""
        if self.count:
            self.calls.set(**{self.count: num_tokens * np.array(self.factors)})


class BlockDecoder:
    """Runs the blocks of decode steps of up to `MAX_TOKENS` tokens, each in one launch. Not thread-safe.

    `states`: of the layers with the gated delta rule, in order: the tail of the convolution, then the memory.
    """

    def __init__(self, weights: StackWeights, pages: KVPages, states: Sequence[Tensor]) -> None:
        """Build the kernel call queues. Raises: ValueError for shapes that `is_supported` rejects."""
        kinds = [torch.bfloat16, torch.float32] * len(weights.delta)
        if not weights.is_supported(pages) or [each.dtype for each in states] != kinds:
            raise ValueError("this model's shapes need torch in every layer")
        self._weights, self._pages, self._states = weights, pages, states
        self._num_threads = torch.get_num_threads()
        self._few = max(1, MAX_DECODE_QUERIES * pages.num_kv_heads // weights.attention[0].num_heads)
        self._groups: dict[tuple[int, str], _Group] = {}
        self._steps: tuple[list[tuple[_Group, int]], ...] = ([], [])  # with each of the two attention kernels
        self._held: list[Tensor] = []  # buffers
        self.chosen: list[Tensor] = []  # experts of the tokens in each layer with experts, [MAX_TOKENS * num_chosen]
        self._num_tokens = 0  # of the previous step
        self._width = weights.norm.shape[0]
        self._x, self._h, self._y = (self._buffer(self._width) for _ in range(3))
        self._build()
        self._queues = tuple(KernelQueue([(group.calls, place) for group, place in steps]) for steps in self._steps)

    def can_run(self, batch: AttentionBatch, num_tokens: int) -> bool:
        """Return whether a step has few enough tokens, in total and in each row."""
        return 0 < num_tokens <= MAX_TOKENS and batch.max_new_tokens <= self._few

    def run(self, x: Tensor, rotation: tuple[Tensor, Tensor], batch: AttentionBatch, slots: Tensor | None) -> Tensor:
        """Return the hidden states after the final norm; write keys, values and states.

        Shapes: x [num_tokens, hidden] bf16, rotation (cos, sin) [num_tokens, rotary_dim / 2] float32, slots [num_rows]
        int32, None for a model without states -> [num_tokens, hidden].
        """
        num_tokens, num_heads = len(x), self._weights.attention[0].num_heads
        threads = min(self._num_threads, torch.get_num_threads())
        cos, sin = (each.contiguous() for each in rotation)
        self._x[: x.numel()].view(x.shape).copy_(x)
        if batch.work is None:
            listed = decode_fields(batch, self._pages, num_heads, threads)
        else:
            listed = shared_fields(batch, batch.work, self._pages, num_heads, threads)
        has_work = batch.work is not None
        self._attend[has_work].calls.set(**listed.fields)
        if num_tokens != self._num_tokens:
            self._set_tokens(num_tokens)
        self._rope.calls.set(slots=batch.slots.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr())
        if slots is not None:
            fields = {"slots": slots.data_ptr(), "offsets": batch.offsets.data_ptr(), "num_rows": len(slots)}
            for group in self._by_row:
                group.calls.set(**fields)
        self._queues[has_work].run(threads)
        return self._h[: x.numel()].view(x.shape).clone()

    def _set_tokens(self, num_tokens: int) -> None:
        """Set how many tokens each kernel call computes."""
        self._num_tokens = num_tokens
        for group in self._groups.values():
            group.set_tokens(num_tokens)
        self._linear.calls.set(configs=matmul.tile_configs(num_tokens).data_ptr())

    def _build(self) -> None:
        """Fill the kernel arguments that do not change between steps, in the order of the calls."""
        w, blocks = self._weights, self._weights.blocks
        widest = max(matmul.scratch_bytes(w.max_inputs), experts.PANEL_SCRATCH_BYTES)
        for each in w.delta:
            widest = max(widest, 8 * each.conv.shape[1] * recurrent.CHANNELS, recurrent.delta_scratch_bytes(each.dim_k))
        self._scratch = torch.empty(self._num_threads * widest, dtype=torch.uint8)
        self._scratch_bytes = widest
        projections = [*(each.qkv for each in w.attention), *(each.projection for each in w.delta)]
        self._wide = self._buffer(max(each.num_outputs for each in projections))
        outs = [*(each.out for each in w.attention), *(each.out for each in w.delta)]
        self._mixed = self._buffer(max(each.num_inputs for each in outs))
        self._queries = self._buffer(w.attention[0].num_heads * self._pages.head_dim)
        if w.delta:
            self._wide = self._buffer(
                max(self._wide.numel() // MAX_TOKENS, *(d.projection.num_outputs for d in w.delta))
            )
            self._convolved = self._buffer(max(each.conv.shape[0] for each in w.delta))
            self._decays, self._betas = (
                self._buffer(max(each.num_heads for each in w.delta), dtype=torch.float32) for _ in range(2)
            )
        self._build_mlp_buffers()
        self._by_row: list[_Group] = []
        norms = [block.mixer_norm for block in blocks[1:]] + [w.norm]
        self._norm(blocks[0].mixer_norm, is_first=True)
        num_attention = num_states = 0
        for block, norm in zip(blocks, norms, strict=True):
            if isinstance(block.mixer, AttentionWeights):
                self._attention(block.mixer, num_attention)
                num_attention += 1
            else:
                self._delta(block.mixer, *self._states[num_states : num_states + 2])
                num_states += 2
            self._norm(block.mlp_norm)
            if isinstance(block.mlp, MLPWeights):
                self._mlp(block.mlp, self._y)
            else:
                self._experts(block.mlp)
            self._norm(norm)

    def _build_mlp_buffers(self) -> None:
        mlps = [block.mlp for block in self._weights.blocks]
        routed = [each for each in mlps if isinstance(each, ExpertsWeights)]
        plain = [each for each in mlps if isinstance(each, MLPWeights)]
        plain += [each.shared for each in routed if each.shared is not None]
        if plain:
            inner = max(each.down.num_inputs for each in plain)
            self._gates, self._gated = self._buffer(2 * inner), self._buffer(inner)
        if routed:
            most = max(each.num_chosen for each in routed)
            inner, num_experts = (
                max(each.down.num_inputs for each in routed),
                max(len(each.up.weight) for each in routed),
            )
            self._logits, self._shared = self._buffer(num_experts), self._buffer(self._width)
            self._scores = self._buffer(num_experts, dtype=torch.float32)
            self._places, self._tokens = (self._buffer(most, dtype=torch.int64) for _ in range(2))
            self._shares = self._buffer(most, dtype=torch.float32)
            self._starts = torch.empty(num_experts + 1, dtype=torch.int64)
            self._rows, self._results = (self._buffer(most * self._width) for _ in range(2))
            self._pair_gates, self._pair_gated = self._buffer(most * 2 * inner), self._buffer(most * inner)

    def _buffer(self, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return memory for `width` numbers of each token; rows are as long as the kernel that uses it makes them."""
        self._held.append(torch.empty(MAX_TOKENS * width, dtype=dtype))
        return self._held[-1]

    def _group(self, launch: Launch, layout: np.dtype[np.void], count: str) -> _Group:
        key = launch.compiled.address, count  # type: ignore[attr-defined]
        return self._groups.setdefault(key, _Group(launch, layout, count))

    def _add(
        self, launch: Launch, layout: np.dtype[np.void], count: str = "num_tokens", factor: int = 1, **fields: Any
    ) -> _Group:
        """Add a kernel call to both queues. `count`, `factor`: as in `_Group`."""
        group = self._group(launch, layout, count)
        place = group.add(fields, factor)
        for steps in self._steps:
            steps.append((group, place))
        return group

    def _multiply(self, linear: PackedLinear, x: Tensor, out: Tensor) -> None:
        self._linear = self._add(
            matmul.multiply_kernel(), matmul.MATMUL_JOB, x=x, weight=linear.weight, out=out, scratch=self._scratch,
            bias=0 if linear.bias is None else linear.bias, num_inputs=linear.num_inputs,
            num_outputs=linear.num_outputs, compact=0 if linear.compact is None else linear.compact,
            scratch_bytes_per_thread=self._scratch_bytes, num_threads=self._num_threads,
        )  # fmt: skip

    def _norm(self, weight: Tensor, *, is_first: bool = False) -> None:
        """Norm `y` added to the residual `x`, or, at first, `x` alone."""
        added = self._x.data_ptr()
        self._add(
            fused.norm_kernel(BFLOAT16, False, KINDS[weight.dtype]), fused.NORM_JOB, "num_rows",
            x=self._x if is_first else self._y, residual=0 if is_first else added, total=0 if is_first else added,
            weight=weight, out=self._h, width=self._width, rows_per_item=1, eps=self._weights.eps,
        )  # fmt: skip

    def _attention(self, w: AttentionWeights, index: int) -> None:
        pages, stride = self._pages, w.qkv.num_outputs
        dim, lanes = pages.head_dim, register_lanes(pages.page_size, pages.head_dim)
        queries, keys = w.num_heads * dim, pages.num_kv_heads * dim
        k_pages, v_pages = pages.k[index], pages.v[index]
        first = self._wide.data_ptr()
        self._multiply(w.qkv, self._h, self._wide)
        self._rope = self._add(
            rope.rope_kernel(BFLOAT16, rope.register_lanes(dim, self._weights.half), KINDS[w.norms.q.dtype]),
            rope.ROPE_JOB, q=first, k=first + 2 * queries, v=first + 2 * (queries + keys), out=self._queries,
            k_pages=k_pages, v_pages=v_pages, q_norm=w.norms.q, k_norm=w.norms.k, q_stride=stride, k_stride=stride,
            v_stride=stride, num_heads=w.num_heads, num_kv_heads=pages.num_kv_heads, head_dim=dim,
            half=self._weights.half, page_size=pages.page_size, tokens_per_item=1, eps=w.norms.eps,
        )  # fmt: skip
        fields = {
            "q": self._queries, "out": self._mixed, "kind": BFLOAT16, "k": k_pages, "v": v_pages,
            "num_heads": w.num_heads, "num_kv_heads": pages.num_kv_heads, "head_dim": dim,
            "page_size": pages.page_size, "window": w.window or 0, "scale": w.scale,
        }  # fmt: skip
        self._attend = (
            self._group(attention_decode.decode_kernel(BFLOAT16, lanes), attention_decode.DECODE_JOB, ""),
            self._group(attention_shared.shared_kernel(BFLOAT16, lanes), attention_shared.SHARED_JOB, ""),
        )
        for steps, group in zip(self._steps, self._attend, strict=True):
            steps.append((group, group.add(fields, 0)))
        if stride > queries + 2 * keys:
            self._add(
                fused.gate_kernel(BFLOAT16), fused.GATE_JOB, "num_rows", x=self._mixed, out=self._mixed,
                gate=first + 2 * (queries + 2 * keys), width=queries, gate_stride=stride,
            )  # fmt: skip
        self._multiply(w.out, self._mixed, self._y)

    def _delta(self, w: DeltaWeights, tails: Tensor, memory: Tensor) -> None:
        num_channels, num_taps = w.conv.shape
        stride, keys, values = w.projection.num_outputs, w.num_key_heads * w.dim_k, w.num_heads * w.dim_v
        first, convolved = self._wide.data_ptr(), self._convolved.data_ptr()
        self._multiply(w.projection, self._h, self._wide)
        convolution = self._add(
            recurrent.conv_kernel(BFLOAT16, KINDS[w.conv.dtype], num_taps), recurrent.CONV_JOB, "", x=first,
            out=convolved, weight=w.conv, bias=0 if w.conv_bias is None else w.conv_bias, states=tails,
            scratch=self._scratch, num_channels=num_channels, stride=stride, silu=w.has_silu,
        )  # fmt: skip
        beta = first + 2 * (num_channels + values)
        self._add(
            recurrent.gates_kernel(BFLOAT16), recurrent.GATES_JOB, a=beta + 2 * w.num_heads, b=beta, g=self._decays,
            beta=self._betas, decay=w.decay, dt_bias=w.dt_bias, num_heads=w.num_heads, stride=stride,
        )  # fmt: skip
        recurrence = self._add(
            recurrent.delta_kernel(BFLOAT16, w.lanes), recurrent.DELTA_JOB, "", q=convolved, k=convolved + 2 * keys,
            v=convolved + 4 * keys, g=self._decays, beta=self._betas, out=self._mixed, states=memory,
            scratch=self._scratch, num_key_heads=w.num_key_heads, num_heads=w.num_heads, dim_k=w.dim_k, dim_v=w.dim_v,
            q_stride=num_channels, k_stride=num_channels, v_stride=num_channels, l2_norm=1, scale=w.dim_k**-0.5,
        )  # fmt: skip
        self._by_row = list(dict.fromkeys((*self._by_row, convolution, recurrence)))
        self._add(
            fused.gated_norm_kernel(BFLOAT16, KINDS[w.norm.dtype]), fused.GATED_NORM_JOB, "num_rows", w.num_heads,
            x=self._mixed, gate=first + 2 * num_channels, weight=w.norm, out=self._mixed, width=w.dim_v,
            heads=w.num_heads, gate_stride=stride, rows_per_item=1, eps=w.eps,
        )  # fmt: skip
        self._multiply(w.out, self._mixed, self._y)

    def _mlp(self, w: MLPWeights, out: Tensor) -> None:
        self._multiply(w.gate_up, self._h, self._gates)
        self._silu(self._gates, self._gated, w.down.num_inputs, 1)
        self._multiply(w.down, self._gated, out)

    def _silu(self, gates: Tensor, gated: Tensor, width: int, factor: int) -> None:
        self._add(
            fused.activation_kernel(BFLOAT16), fused.ACTIVATION_JOB, "num_rows", factor, gate_up=gates, out=gated,
            width=width, rows_per_item=1,
        )  # fmt: skip

    def _experts(self, w: ExpertsWeights) -> None:
        num_experts, tile_tokens = len(w.up.weight), experts.choose_tile_tokens(w.up.num_inputs)
        num_lines = experts.max_tiles(MAX_TOKENS * w.num_chosen, num_experts, tile_tokens)
        tiles = torch.empty(num_lines, 3, dtype=torch.int64)
        self._held.append(tiles)
        ids = self._buffer(w.num_chosen, dtype=torch.int64)
        self.chosen.append(ids)
        self._multiply(w.router, self._h, self._logits)
        self._add(
            experts.route_kernel(BFLOAT16), experts.ROUTE_JOB, logits=self._logits, scores=self._scores, ids=ids,
            weights=self._shares, num_experts=num_experts, num_chosen=w.num_chosen, is_normalised=w.is_normalised,
        )  # fmt: skip
        self._add(
            experts.plan_kernel(), experts.PLAN_JOB, "num_pairs", w.num_chosen, ids=ids, order=self._places,
            tokens=self._tokens, starts=self._starts, tiles=tiles, num_choices=w.num_chosen, num_experts=num_experts,
            tile_tokens=tile_tokens,
        )  # fmt: skip
        self._add(
            megakernel.gather_kernel(), megakernel.GATHER_JOB, "num_rows", w.num_chosen, source=self._h,
            rows=self._tokens, out=self._rows, words=self._width // 4,
        )  # fmt: skip
        self._multiply_experts(w.up, self._rows, self._pair_gates, tiles)
        self._silu(self._pair_gates, self._pair_gated, w.down.num_inputs, w.num_chosen)
        self._multiply_experts(w.down, self._pair_gated, self._results, tiles)
        self._add(
            experts.combine_kernel(BFLOAT16), experts.COMBINE_JOB, y=self._results, places=self._places,
            weights=self._shares, out=self._y, num_choices=w.num_chosen, width=self._width, rows_per_item=1,
        )  # fmt: skip
        if w.shared is not None and w.shared_gate is not None:
            self._mlp(w.shared, self._shared)
            self._add(
                experts.shared_kernel(BFLOAT16), experts.SHARED_JOB, x=self._h, gate=w.shared_gate, y=self._shared,
                out=self._y, num_inputs=self._width, width=self._width,
            )  # fmt: skip

    def _multiply_experts(self, w: ExpertWeights, x: Tensor, out: Tensor, tiles: Tensor) -> None:
        self._add(
            experts.panel_kernel(), experts.EXPERTS_JOB, "", x=x, weight=w.weight, bias=0 if w.bias is None else w.bias,
            out=out, scratch=self._scratch, tiles=tiles, configs=experts.group_configs(), num_inputs=w.num_inputs,
            num_outputs=w.num_outputs, row_bytes=2 * w.num_inputs,
            expert_bytes=w.weight.stride(0) * w.weight.element_size(),
            scratch_bytes_per_thread=experts.PANEL_SCRATCH_BYTES, **experts.compact_fields(w),
        )  # fmt: skip
