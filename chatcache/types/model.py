"""What is told of the model."""

from __future__ import annotations

import msgspec


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the house may know of a loaded model. `digest` (hex) seeds page keys: same weights, same key.

    `weight_bytes` are held, `step_bytes` of them are read by every step. `quantization`: none | int8.
    """

    name: str
    digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
    num_parameters: int = 0
    dtype: str = ""
    device: str = "cpu"
    attention: str = ""
    quantization: str = "none"
    step_bytes: int = 0

    @property
    def precision(self) -> str:
        """What it computes with, for people: the dtype, and how weights are kept if otherwise."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights"
