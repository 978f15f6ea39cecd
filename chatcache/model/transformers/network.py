"""A transformers model as an `attention.Network`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from chatcache.model.attention import AttentionStep
from chatcache.model.geometry import Geometry
from chatcache.model.transformers.attention import Pass, attending


class TransformersNetwork:
    """A transformers model as an `attention.Network`.

    `base`: the module without the output head, which returns the final hidden states as `last_hidden_state`.
    `windows`: as in `Pass`. `idle_bytes`: of weights that a token does not read, those of experts that it does not use.
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        max_position: int,
        base: nn.Module | None = None,
        windows: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.geometry = geometry
        self.idle_bytes = 0
        self._windows = windows
        self.max_position = max_position
        self._model = model
        self._base = base
        self._output_type: Callable[..., Any] = BaseModelOutputWithPast
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return logits [U, V]; arguments as in `Network.forward`."""
        keep = {"logits_to_keep": drawn} if self._has_logits_to_keep and drawn is not None else {}
        logits: Tensor = run_model(self._model, tokens, Pass(step, positions, self._windows), keep).logits[0]
        return logits if self._has_logits_to_keep or drawn is None else logits[drawn]

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        """Return final hidden states [N, hidden]; arguments as in `Network.hidden_states`."""
        if self._base is None:
            raise ValueError("this model returns no hidden states")
        out = run_model(self._base, tokens, Pass(step, positions, self._windows), {})
        self._output_type = type(out)
        states: Tensor = out.last_hidden_state[0, wanted]
        return states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of final hidden states, [N, V].

        transformers has no general way to run the output head alone, so the whole model runs, and its base returns
        `hidden_states` without computing anything.
        """
        base: Any = self._base
        out = self._output_type(last_hidden_state=hidden_states[None])
        base.forward = lambda *_, **__: out
        try:
            ids = torch.zeros(1, len(hidden_states), dtype=torch.int64, device=hidden_states.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del base.forward
        return logits


@contextmanager
def record_states(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Append each of `modules` that returns a `last_hidden_state`, with that, [T, hidden], as it is called."""
    recorded: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, inputs: object, out: Any) -> None:
        if isinstance(states := getattr(out, "last_hidden_state", None), Tensor):
            recorded.append((module, states[0]))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(record).remove)
        yield recorded


def run_model(model: Any, tokens: Tensor, current: Pass, keep: Mapping[str, Tensor]) -> Any:
    """Run a model, or its base, on the tokens of a step, and return its output."""
    ids, positions = tokens[None], current.positions[None]
    with attending(current):
        return model(input_ids=ids, position_ids=positions, use_cache=False, **keep)
