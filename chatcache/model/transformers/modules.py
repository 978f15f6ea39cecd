"""Replaced modules of transformers models: fused norms and gated MLPs, and on the CPU packed linear layers.

A module keeps its place and its name. A linear layer's product is replaced, and its plain weight is freed; modules that
read the weight of a linear layer themselves must be replaced before. At decode, each operation of torch takes
microseconds, and a norm is nine of them: norms and MLPs become single kernels, but only where the kernel gives the
module's results on random inputs, up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from chatcache_kernels.experts import Activation
from torch import Tensor, nn

from chatcache.model.attention import AttentionBackend
from chatcache.model.linear import LinearFactory, gated_mlp, head_factory

PROBES = 4


class UnknownFormError(Exception):
    """A module of transformers that has another form than those that are replaced."""


class FusedNorm(nn.Module):
    """RMSNorm in one kernel. `weight` includes the 1 that some families add."""

    def __init__(self, kernels: AttentionBackend, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps)


class FusedMLP(nn.Module):
    """Gated MLP: gate and up projections in one product, the activation `activate` in one kernel."""

    def __init__(self, activate: Activation, source: Any) -> None:
        super().__init__()
        weight = torch.cat((source.gate_proj.weight.detach(), source.up_proj.weight.detach()))
        self.gate_up_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.gate_up_proj.weight = nn.Parameter(weight, requires_grad=False)
        self.down_proj = source.down_proj
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = (getattr(each, "product", each) for each in (self.gate_up_proj, self.down_proj))
        return gated_mlp(gate_up, down, x.reshape(-1, x.shape[-1]), self.activate).view(x.shape)


def fuse_modules(model: nn.Module, kernels: AttentionBackend) -> None:
    """Replace the norms and gated MLPs of a model where that changes no result."""
    replace_modules(model, lambda module: _fuse_norm(module, kernels) or _fuse_mlp(module, kernels))


def replace_modules(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module of a model for which `make` returns another, before the modules inside of it.

    A replaced module is released before the next one is made, so that few weights are in memory twice.
    """
    for path in [path for path, _ in model.named_modules() if path]:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = model.get_submodule(parent_path)
            child = parent.get_submodule(name)
        except AttributeError:  # it was inside of a module that has been replaced
            continue
        new = make(child)
        if new is not None:
            setattr(parent, name, new)


def _fuse_norm(module: Any, kernels: AttentionBackend) -> FusedNorm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    plain = weight.detach()
    for candidate in (plain, plain.float() + 1):
        fused = FusedNorm(kernels, candidate, eps)
        if _gives_same(module, fused, len(plain), plain):
            return fused
    return None


def _fuse_mlp(module: Any, kernels: AttentionBackend) -> FusedMLP | None:
    names = ("gate_proj", "up_proj", "down_proj")
    layers = [child for name, child in module.named_children() if name in names and type(child) is nn.Linear]
    if len(layers) < 3 or any(layer.bias is not None for layer in layers):
        return None
    if set(dict(module.named_children())) - {*names, "act_fn"}:
        return None
    fused = FusedMLP(kernels.silu_mul, module)
    for activate in (kernels.silu_mul, kernels.gelu_mul):
        fused.activate = activate
        if _gives_same(module, fused, layers[0].in_features, layers[0].weight):
            return fused
    return None


def _gives_same(module: nn.Module, fused: nn.Module, width: int, weight: Tensor) -> bool:
    """Return whether both modules give the same on random inputs of the weight's type, up to rounding."""
    probe = torch.randn(1, PROBES, width, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.inference_mode():
        try:
            want, got = module(probe), fused(probe)
        except (TypeError, ValueError, RuntimeError, IndexError):  # a module with other arguments, or another shape
            return False
    return isinstance(want, Tensor) and want.dtype == got.dtype and is_close(want, got, weight.dtype)


def is_close(want: Tensor, got: Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers computed in `dtype` are equal up to rounding."""
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    return want.shape == got.shape and bool((want - got).abs().max() <= tolerance * want.abs().max().clamp(min=1e-6))


class PackedModule(nn.Module):
    """A linear layer whose weight is packed. Shapes: [..., in] -> [..., out]."""

    def __init__(self, source: nn.Linear, make_linear: LinearFactory) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        bias = None if source.bias is None else source.bias.detach()
        self.product = make_linear(source.weight.detach(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack_linears(model: Any, make_linear: LinearFactory) -> None:
    """Replace every linear layer of a model, the output head included.

    A head that is tied to the embeddings gets a packed weight of its own.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_plain = type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16)
            if is_plain and not reads_weight(type(parent), name):
                setattr(parent, name, PackedModule(child, head_factory(make_linear) if child is head else make_linear))


def reads_weight(module: type[nn.Module], name: str) -> bool:
    """Return whether the code of a module uses the weight of its linear layer `name` itself, as some routers do."""
    methods = [each for each in vars(module).values() if inspect.isfunction(each) and each.__name__ != "__init__"]
    return any(f"self.{name}.weight" in inspect.getsource(each) for each in methods)


def unpacked_share(model: Any, num_packed: int) -> float:
    """Return the share of a model's matrices that `pack_linears` left as they are, apart from embedding tables.

    `num_packed`: the number of weights that it packed.
    """
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    left: int = sum(each.numel() for each in model.parameters() if each.ndim > 1 and id(each) not in tables)
    return left / (left + num_packed)
