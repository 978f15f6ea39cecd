"""Linear layers of transformers modules, with weights packed for the CPU.

A module keeps its place and its name; its product is replaced, and its plain weight is freed. Modules that read the
weight of a linear layer themselves must be replaced before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from chatcache.model.linear import LinearFactory


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
    """Replace every linear layer of a model on a CPU, the output head included.

    A head that is tied to the embeddings gets a packed weight of its own.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_plain = type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16)
            if is_plain and not reads_weight(type(parent), name):
                setattr(parent, name, PackedModule(child, make_linear))


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
