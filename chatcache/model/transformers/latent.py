"""Latent attention (MLA) of transformers models on pages of latents: DeepSeek V2 and V3, GLM-4.7-Flash and others.

transformers' attention modules of these families compute queries, latents and rotary keys, and call `expand_kv` to
project keys and values of every head from the latents. `install_latent_attention` replaces that method of each module:
it returns the latents themselves, which the registered attention function stores in pages. Then, for each row of the
step, the cheaper of two forms is computed, which are equal up to rounding:

    absorbed   project the queries into the latent space, attend to the latents, project the results back
    expanded   project keys and values of every head from the row's latents, and attend to those

Absorbed attention needs 2 to 4 times the operations per query and key, but no projection per key: it is the form of
decode steps and of short prompts after long cached prefixes; expanded attention is that of long prompts. On a GPU, one
form is chosen for the whole step, since the kernel's work list covers all rows. Rows that share a prefix read its
latents once in the Triton kernel's work list; the CPU reads them for each row.

Source: DeepSeek-V2 (2024), absorbed projections.
"""

from __future__ import annotations

from typing import Any

import torch
from chatcache_kernels.reference_latent import context_slots
from chatcache_kernels.types import AttentionBatch
from torch import Tensor, nn
from torch.nn import functional

from chatcache.model.attention import AttentionStep

MAX_EXPANDED = 1 << 27
"""Elements of the keys and values that one row may expand to in a layer."""


class LatentAttention:
    """The key and value projections of one layer."""

    def __init__(self, module: Any, plan: FormPlan) -> None:
        nope, value, rank = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
        weight = module.kv_b_proj.weight.view(-1, nope + value, rank)
        self.num_heads, self.rank, self.value_dim = int(weight.shape[0]), int(rank), int(value)
        self._nope, self._rope = int(nope), int(module.qk_rope_head_dim)
        self._keys, self._values = weight[:, :nope], weight[:, nope:]
        self._expand = module.kv_b_proj
        self._plan = plan

    def attend(self, step: AttentionStep, layer: int, q: Tensor, latents: Tensor, scale: float) -> Tensor:
        """Write the latents of new tokens to their pages, and return the attention of q.

        Shapes: q [T, H, nope + rope], latents [T, rank + rope] -> [T, H, value].
        """
        pages, index, batch = step.latent_place(layer)
        step.kernels.write_latents(pages, index, latents, batch.slots)
        expanded = self._plan.expanded_rows(batch, self)
        if not expanded:
            return self._project(step.kernels.latent_attention(self._absorb(q), pages, index, batch, scale))
        out = q.new_empty(len(q), self.num_heads, self.value_dim)
        if len(expanded) < len(batch.start):
            counts = batch.num_tokens.clone()
            counts[[row for row, *_ in expanded]] = 0
            rest = torch.repeat_interleave(counts > 0, batch.num_tokens.long())
            queries = q.new_zeros(len(q), self.num_heads, self.rank + self._rope)
            queries[rest] = self._absorb(q[rest])
            others = AttentionBatch(
                batch.tables, batch.start, counts, batch.offsets, batch.slots, batch.max_new_tokens,
                batch.max_context_tokens, batch.work,
            )  # fmt: skip
            out[rest] = self._project(step.kernels.latent_attention(queries, pages, index, others, scale)[rest])
        for row, first, start, count in expanded:
            slots = context_slots(pages, batch.tables[row], start + count)
            known = step.kernels.read_latents(pages, index, slots).to(q.dtype)
            out[first : first + count] = self._attend_expanded(q[first : first + count], known, scale)
        return out

    def cost_of_absorbed(self, start: int, count: int) -> float:
        """Return the multiplications of one row in absorbed form, per head."""
        keys = count * (start + (count + 1) / 2)
        return keys * (2 * self.rank + self._rope) + count * self.rank * (self._nope + self.value_dim)

    def cost_of_expanded(self, start: int, count: int) -> float:
        """Return the multiplications of one row in expanded form, per head; infinity if it takes too much memory."""
        if (start + count) * self.num_heads * (self._nope + self._rope + self.value_dim) > MAX_EXPANDED:
            return float("inf")
        keys = count * (start + (count + 1) / 2)
        projection = (start + count) * self.rank * (self._nope + self.value_dim)
        return keys * (self._nope + self._rope + self.value_dim) + projection

    def _absorb(self, q: Tensor) -> Tensor:
        """Project queries into the latent space. Shapes: [T, H, nope + rope] -> [T, H, rank + rope]."""
        absorbed = torch.bmm(q[..., : self._nope].transpose(0, 1), self._keys).transpose(0, 1)
        return torch.cat((absorbed, q[..., self._nope :]), -1)

    def _project(self, weighted: Tensor) -> Tensor:
        """Project weighted latents to values. Shapes: [T, H, rank] -> [T, H, value]."""
        return torch.bmm(weighted.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)

    def _attend_expanded(self, q: Tensor, latents: Tensor, scale: float) -> Tensor:
        """Attend to the keys and values that the latents of one row expand to; the last ones are those of q.

        Values are padded to the size of keys, as torch's fused kernels need.
        Shapes: q [n, H, nope + rope], latents [S, rank + rope] -> [n, H, value].
        """
        count, length = len(q), len(latents)
        kv = self._expand(latents[:, : self.rank]).view(length, self.num_heads, -1).transpose(0, 1)
        rope = latents[:, self.rank :].expand(self.num_heads, -1, -1)
        k = torch.cat((kv[..., : self._nope], rope), -1)
        v = kv[..., self._nope :]
        if v.shape[-1] < k.shape[-1]:
            v = functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
        mask = None
        if count < length:
            mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], mask, is_causal=mask is None, scale=scale
        )
        return out[0, ..., : self.value_dim].transpose(0, 1)


class FormPlan:
    """Chooses the form of each row once a step; all layers of a model share it."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._rows: list[tuple[int, int, int, int]] = []

    def expanded_rows(self, batch: AttentionBatch, layer: LatentAttention) -> list[tuple[int, int, int, int]]:
        """Return (row, first token, start, number of tokens) of the rows to expand."""
        if batch.max_new_tokens <= 1:
            return []
        if batch is not self._batch:
            self._batch, self._rows = batch, self._choose(batch, layer)
        return self._rows

    def _choose(self, batch: AttentionBatch, layer: LatentAttention) -> list[tuple[int, int, int, int]]:
        host = [x.tolist() for x in (batch.offsets[:-1], batch.start, batch.num_tokens)]
        rows = [(row, *each) for row, each in enumerate(zip(*host, strict=True)) if each[2]]
        absorbed = [layer.cost_of_absorbed(start, count) for _, _, start, count in rows]
        expanded = [layer.cost_of_expanded(start, count) for _, _, start, count in rows]
        if batch.work is not None:
            return rows if sum(expanded) < sum(absorbed) else []
        return [row for row, one, other in zip(rows, expanded, absorbed, strict=True) if row[3] > 1 and one < other]


def install_latent_attention(model: nn.Module) -> None:
    """Let the latent attention modules of a model hand their latents to the registered attention function.

    Modules that choose keys with an indexer (sparse attention) keep their own attention.
    """
    plan = FormPlan()
    for module in model.modules():
        names = ("kv_b_proj", "expand_kv", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if all(hasattr(module, name) for name in names) and not hasattr(module, "indexer"):
            module.latent_attention = LatentAttention(module, plan)  # type: ignore[assignment]
            module.expand_kv = _keep_latents  # type: ignore[assignment]
            module.kv_b_proj = None  # type: ignore[assignment]  # LatentAttention has it, not to be packed or quantised


def _keep_latents(latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents with rotary keys as keys, and latents as values. Shapes: [1, 1, T, rank], [1, 1, T, rope]."""
    return torch.cat((latents, rope), -1), latents
