"""States of recurrent and convolution layers: a fixed number of bytes per branch or snapshot, in numbered slots.

A slot holds one tensor per `StateShape` of the model. Slot 0 is the zero state, which is never written; a branch starts
from a copy of it. One more slot after those that a scheduler may use is for warm-up and probes. Tensors of equal shape
are one allocation, so that a slot is copied in few operations:

    memory of a shape   [layers of that shape, num_states + 1, *shape]
    what a layer gets   [num_states + 1, *shape], updated in place by the rows of a step
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chatcache.model.streams import to_device
from chatcache.types.plan import I32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a state, such as the last inputs of one layer's convolution."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of this tensor in one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class StateStep:
    """States of the rows of a step, which every pass over the layers updates.

    `is_changed`: a layer has updated a state, so the step cannot be run again from the start.
    Shapes: slots [R] int32.
    """

    tensors: Sequence[Tensor]
    slots: Tensor
    is_changed: bool = field(default=False)

    def update(self, index: int) -> Tensor:
        """Return tensor `index` of all slots, [num_slots, *shape], to be updated in place at `slots`."""
        self.is_changed = True
        return self.tensors[index]


class StateStore:
    """The states of a model on its device, and those swapped to host memory.

    Work is enqueued on the stream that is current. Plans name slots 0 to `num_states` - 1.
    """

    def __init__(
        self, shapes: Sequence[StateShape], num_states: int, num_host_states: int, device: torch.device
    ) -> None:
        self._device = device
        self.num_states = num_states
        self.scratch = num_states
        self._groups: list[Tensor] = []
        self._host: list[Tensor] = []
        placed: list[Tensor | None] = [None] * len(shapes)
        for shape in dict.fromkeys(shapes):
            members = [index for index, each in enumerate(shapes) if each == shape]
            group = torch.zeros(len(members), num_states + 1, *shape.shape, dtype=shape.dtype, device=device)
            self._groups.append(group)
            for place, index in enumerate(members):
                placed[index] = group[place]
        self.tensors = tuple(tensor for tensor in placed if tensor is not None)
        self.num_host_states = self._allocate_host(num_host_states, device)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot."""
        return sum(group[:, 0].numel() * group.element_size() for group in self._groups)

    def step(self, slots: I32) -> StateStep:
        """Return the states of a step's rows. Shapes: slots [R].

        Raises: ValueError for a slot that does not exist, or the zero state, which is never written.
        """
        check_slots("state", slots, 1, self.scratch + 1)
        return StateStep(self.tensors, to_device(slots, self._device))

    def copy(self, pairs: I32) -> None:
        """Copy states between slots. Shapes: pairs [N, 2] (source, target); no target is also a source.

        Raises: ValueError for a slot that does not exist, or the zero state as a target.
        """
        if not len(pairs):
            return
        check_slots("state", pairs[:, 0], 0, self.num_states)
        check_slots("state", pairs[:, 1], 1, self.num_states)
        for source, target in pairs.tolist():
            for group in self._groups:
                group[:, target].copy_(group[:, source])

    def swap(self, swaps_out: I32, swaps_in: I32) -> None:
        """Copy states to host memory, then others back; the slots have been checked by `check_swaps`.

        Shapes: swaps_out [S, 2] (state, host state), swaps_in [S, 2] (host state, state).
        """
        for state, host_state in swaps_out.tolist():
            for group, host in zip(self._groups, self._host, strict=True):
                host[host_state].copy_(group[:, state], non_blocking=True)
        for host_state, state in swaps_in.tolist():
            for group, host in zip(self._groups, self._host, strict=True):
                group[:, state].copy_(host[host_state], non_blocking=True)

    def check_swaps(self, swaps_out: I32, swaps_in: I32) -> None:
        """Check the slots of a plan's swaps. Raises: ValueError as `copy`."""
        check_slots("state", swaps_out[:, 0], 0, self.num_states)
        check_slots("host state", swaps_out[:, 1], 0, self.num_host_states)
        check_slots("host state", swaps_in[:, 0], 0, self.num_host_states)
        check_slots("state", swaps_in[:, 1], 1, self.num_states)

    def clear_scratch(self) -> None:
        """Set the scratch slot to zero."""
        for group in self._groups:
            group[:, self.scratch].zero_()

    def _allocate_host(self, num_states: int, device: torch.device) -> int:
        """Allocate host memory, locked if the device is a GPU; return the number of slots, 0 if it cannot be locked."""
        pinned = device.type == "cuda"
        try:
            self._host = [
                torch.empty(num_states, len(group), *group.shape[2:], dtype=group.dtype, pin_memory=pinned)
                for group in self._groups
            ]
        except RuntimeError as error:
            if not pinned:
                raise
            log.warning("no memory is locked for %d states (%s): they are computed again instead", num_states, error)
            self._host = [torch.empty(0, len(group), *group.shape[2:], dtype=group.dtype) for group in self._groups]
            return 0
        return num_states


def make_states(
    shapes: Sequence[StateShape], num_states: int, num_host_states: int, device: torch.device
) -> StateStore | None:
    """Allocate the states of a model, None for a model without."""
    return StateStore(shapes, num_states, num_host_states, device) if shapes else None


def check_slots(name: str, slots: I32, first: int, end: int) -> None:
    """Check that all slots are at least `first` and less than `end`. Raises: ValueError."""
    bad = slots[(slots < first) | (slots >= end)]
    if len(bad):
        raise ValueError(f"a plan names {name} {bad[0]}; allowed are {first} to {end - 1}")
