"""Recurrent and convolution layers of transformers models on the states of a step.

transformers keeps the states of such a layer in its cache object, one batch entry per sequence. Here the batch is
flattened, [1, T], and each row names a slot of the `StateStep`. A module is therefore replaced by one that computes the
same from the same weights with the kernels of the step; projections and norms stay those of transformers. Three kinds
of layers cover the families:

    gated delta rule    Qwen3-Next, Qwen3.5, OLMo Hybrid              states: convolution tail, matrix per value head
    Mamba-2             Bamba, Falcon-H1, Granite 4, Nemotron-H,      states: convolution tail, matrix per head
                        Zamba2
    short convolution   LFM2, LFM3                                    states: convolution tail

Source: Yang et al., "Gated Delta Networks", ICLR 2025; Dao and Gu, "Transformers are SSMs", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chatcache.model.attention import AttentionStep
from chatcache.model.states import StateShape
from chatcache.model.transformers.attention import Probe, current_step


class Mixer(nn.Module):
    """A layer that replaces one of transformers and keeps states.

    `shapes`: of its states, in the order in which `_mix` asks for them; `first_state`: the number of the first one.
    """

    def __init__(self, source: nn.Module, first_state: int) -> None:
        super().__init__()
        self.layer_idx = int(source.layer_idx)  # type: ignore[arg-type]
        self.first_state = first_state
        self.shapes: tuple[StateShape, ...] = ()

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the layer's output, [1, T, hidden]; transformers' masks and caches are not used."""
        return self.mix(hidden_states[0], current_step())[None]

    def mix(self, x: Tensor, step: AttentionStep | Probe, rotation: object = None) -> Tensor:
        """Return the layer's output; there is no rotary embedding. Shapes: x [T, hidden] -> [T, hidden]."""
        return x if isinstance(step, Probe) else self._mix(x, step)

    def _mix(self, x: Tensor, step: AttentionStep) -> Tensor:
        raise NotImplementedError

    def _set_convolution(self, conv: nn.Conv1d, activation: str | None) -> StateShape:
        """Take the weights of a depthwise causal convolution; return the shape of its state."""
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"a convolution with activation {activation!r} is not supported")
        self._activation = None if activation is None else "silu"
        self.conv_weight = nn.Parameter(conv.weight.detach().squeeze(1).contiguous(), requires_grad=False)
        self.conv_bias = None if conv.bias is None else nn.Parameter(conv.bias.detach(), requires_grad=False)
        return StateShape((conv.weight.shape[0], conv.weight.shape[2] - 1), conv.weight.dtype)

    @property
    def has_silu(self) -> bool:
        """Return whether SiLU follows the convolution."""
        return self._activation is not None

    def _convolve(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Convolve the new tokens of each row, after the last inputs of its state. Shapes: x [T, C] -> [T, C]."""
        states = _states(step)
        return step.kernels.causal_conv(
            x, self.conv_weight, self.conv_bias, states.update(self.first_state), states.slots,
            step.batch.offsets, self._activation,
        )  # fmt: skip


class GatedDeltaNet(Mixer):
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

    The input projections are one: queries, keys and values, as the convolution reads them | z | b | a.
    """

    def __init__(self, source: Any, first_state: int) -> None:
        super().__init__(source, first_state)
        self.num_k_heads, self.num_v_heads = source.num_k_heads, source.num_v_heads
        self.head_k_dim, self.head_v_dim = source.head_k_dim, source.head_v_dim
        self.widths = [source.conv_dim, source.value_dim, source.num_v_heads, source.num_v_heads]
        self.conv_widths = [source.key_dim, source.key_dim, source.value_dim]
        self.in_proj = _join_projections(source)
        self.norm = source.o_norm if hasattr(source, "o_norm") else source.norm
        self.out_proj = source.o_proj if hasattr(source, "o_proj") else source.out_proj
        if getattr(self.norm, "activation", "silu") != "silu":
            raise ValueError(f"a norm gated by {self.norm.activation!r} is not supported")
        self.max_beta = 2.0 if getattr(source, "allow_neg_eigval", False) else 1.0
        self.decay = nn.Parameter(-source.A_log.detach().float().exp(), requires_grad=False)
        self.dt_bias = nn.Parameter(source.dt_bias.detach().float(), requires_grad=False)
        memory = StateShape((self.num_v_heads, self.head_k_dim, self.head_v_dim), torch.float32)
        self.shapes = (self._set_convolution(source.conv1d, source.activation), memory)

    def _mix(self, x: Tensor, step: AttentionStep) -> Tensor:
        qkv, z, b, a = torch.split(self.in_proj(x), self.widths, dim=-1)
        q, k, v = torch.split(self._convolve(qkv, step), self.conv_widths, dim=-1)
        states, beta = _states(step), b.sigmoid()
        mixed = step.kernels.gated_delta_rule(
            q.reshape(-1, self.num_k_heads, self.head_k_dim),
            k.reshape(-1, self.num_k_heads, self.head_k_dim),
            v.reshape(-1, self.num_v_heads, self.head_v_dim),
            self.decay * functional.softplus(a.float() + self.dt_bias),
            beta if self.max_beta == 1.0 else beta * self.max_beta,
            states.update(self.first_state + 1),
            states.slots,
            step.batch.offsets,
            self.head_k_dim**-0.5,
            l2_norm=True,
        )
        z, norm = z.view(-1, self.num_v_heads, self.head_v_dim), self.norm
        normed = step.kernels.gated_rms_norm(mixed, z, norm.weight, norm.variance_epsilon)
        out: Tensor = self.out_proj(normed.view(len(x), -1))
        return out


class ShortConvolution(Mixer):
    """The gated short convolution of LFM2 and LFM3."""

    def __init__(self, source: Any, first_state: int) -> None:
        super().__init__(source, first_state)
        self.in_proj, self.out_proj = source.in_proj, source.out_proj
        self.shapes = (self._set_convolution(source.conv, None),)

    def _mix(self, x: Tensor, step: AttentionStep) -> Tensor:
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        out: Tensor = self.out_proj(c * self._convolve(b * x, step))
        return out


class Mamba2(Mixer):
    """The Mamba-2 layer of Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2.

    transformers limits the time step of prompts only; here the limit holds for every token, so that a token's state
    does not depend on whether it was part of a prompt.
    """

    def __init__(self, source: Any, first_state: int) -> None:
        super().__init__(source, first_state)
        self.num_heads, self.head_dim = source.num_heads, source.head_dim
        self.num_groups, self.state_size = source.n_groups, source.ssm_state_size
        self.widths = [source.intermediate_size, source.conv_dim, source.num_heads]
        grouped = self.num_groups * self.state_size
        self.conv_widths = [source.intermediate_size, grouped, grouped]
        self.in_proj, self.norm, self.out_proj = source.in_proj, source.norm, source.out_proj
        self.limits = tuple(map(float, source.time_step_limit))
        self.a = nn.Parameter(-source.A_log.detach().float().exp(), requires_grad=False)
        self.d = nn.Parameter(source.D.detach().float(), requires_grad=False)
        self.dt_bias = nn.Parameter(source.dt_bias.detach().float(), requires_grad=False)
        # Falcon-H1 multiplies the inputs and outputs of `in_proj`, and may gate without a norm
        self.in_multiplier = float(getattr(source, "ssm_in_multiplier", 1.0))
        mup = getattr(source, "mup_vector", None)
        self.out_multipliers = None if mup is None else nn.Parameter(mup.detach().reshape(-1), requires_grad=False)
        self.has_norm = bool(getattr(source, "mamba_rms_norm", True))
        memory = StateShape((self.num_heads, self.head_dim, self.state_size), torch.float32)
        self.shapes = (self._set_convolution(source.conv1d, source.activation), memory)

    def _mix(self, x: Tensor, step: AttentionStep) -> Tensor:
        projected = self.in_proj(x if self.in_multiplier == 1.0 else x * self.in_multiplier)
        if self.out_multipliers is not None:
            projected = projected * self.out_multipliers
        gate, conv_inputs, dt = torch.split(projected, self.widths, dim=-1)
        inner, b, c = torch.split(self._convolve(conv_inputs, step), self.conv_widths, dim=-1)
        states = _states(step)
        scanned = step.kernels.ssd_scan(
            inner.reshape(-1, self.num_heads, self.head_dim),
            functional.softplus(dt.float() + self.dt_bias).clamp(*self.limits),
            self.a,
            b.reshape(-1, self.num_groups, self.state_size),
            c.reshape(-1, self.num_groups, self.state_size),
            self.d,
            states.update(self.first_state + 1),
            states.slots,
            step.batch.offsets,
        ).view(len(x), -1)
        if self.has_norm:  # transformers' gated norms want a batch
            gated = self.norm(scanned[None], gate[None])[0]
        else:
            gated = scanned * functional.silu(gate)
        out: Tensor = self.out_proj(gated.to(x.dtype))
        return out


MIXERS: dict[str, Callable[[Any, int], Mixer]] = {
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": GatedDeltaNet,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
    "Lfm3ShortConv": ShortConvolution,
    "BambaMixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "Zamba2MambaMixer": Mamba2,
}
"""The replacement of each module, by its class in transformers."""


def replace_mixers(model: nn.Module) -> list[Mixer]:
    """Replace the recurrent and convolution layers of a model in place; return the replacements.

    Raises: ValueError for a variant of a layer that is not supported.
    """
    mixers: list[Mixer] = []
    num_states = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            make = MIXERS.get(type(child).__name__)
            if make is not None:
                mixer = make(child, num_states)
                setattr(parent, name, mixer)
                num_states += len(mixer.shapes)
                mixers.append(mixer)
    return mixers


def state_shapes(mixers: list[Mixer]) -> tuple[StateShape, ...]:
    """Return the shapes of all states, numbered as the mixers number them."""
    return tuple(shape for mixer in mixers for shape in mixer.shapes)


def _states(step: AttentionStep) -> Any:
    if step.states is None:
        raise ValueError("the step has no states, and this model keeps some")
    return step.states


def _join_projections(source: Any) -> nn.Linear:
    """Return the input projections of a gated delta rule as one.

    Qwen3-Next stores them per key head, as q k v z and as b a.
    """
    names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    if hasattr(source, "q_proj"):
        names = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"]
    if hasattr(source, names[0]):
        weight = torch.cat([getattr(source, name).weight.detach() for name in names])
    else:
        qkvz, ba = source.in_proj_qkvz.weight.detach(), source.in_proj_ba.weight.detach()
        heads, ratio = source.num_k_heads, source.num_v_heads // source.num_k_heads
        k, v = source.head_k_dim, ratio * source.head_v_dim
        split = torch.split(qkvz.view(heads, -1, qkvz.shape[1]), [k, k, v, v], dim=1)
        split += torch.split(ba.view(heads, -1, ba.shape[1]), [ratio, ratio], dim=1)
        weight = torch.cat([part.reshape(-1, part.shape[2]) for part in split])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    return joined
