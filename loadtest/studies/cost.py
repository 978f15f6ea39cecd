"""Seconds of one step of a simulated model, and the KV memory that the model leaves.

    seconds = base + per_row * rows + per_context_token * cached and new tokens + per_prompt_token * prompt tokens

For OPT-13B on one A100-40GB, `per_context_token` is 819,200 B of keys and values at 1.3 TB/s, `per_prompt_token` is
26 GFLOP at 130 TFLOP/s, and 16.7 ms of the base are 26 GB of weights at 1.555 TB/s. Two numbers are fitted: the
remaining 8.8 ms of the base, and `per_row`, by Little's law on the two vLLM bars of the paper's Figure 13. The costs
of the larger models use the same rates and no further fit: weights and keys are spread over the GPUs, and the 8.8 ms
of launches and host work grow with the number of layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

FITTED_BASE_S = 0.0088
FITTED_ROW_S = 0.26e-3
A100_BYTES_PER_S = 1.555e12
A100_80GB_BYTES_PER_S = 2.039e12
KV_READ_SHARE = 1.3 / 1.555
A100_FLOPS = 130e12
OPT_13B_LAYERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Costs in seconds. `num_slots`: KV slots (tokens) of the device memory. `swap_s`: of one token, one direction."""

    name: str
    num_slots: int
    base: float
    per_row: float
    per_context_token: float
    per_prompt_token: float
    swap_s: float = 0.0

    def seconds(self, num_rows: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        return (
            self.base
            + self.per_row * num_rows
            + self.per_context_token * num_context_tokens
            + self.per_prompt_token * num_prompt_tokens
        )


def _opt(name: str, params: float, layers: int, width: int, gpus: int, slots: int, bytes_per_s: float) -> StepCost:
    kv_bytes = 2 * 2 * layers * width
    return StepCost(
        name=name,
        num_slots=slots,
        base=2 * params / (gpus * bytes_per_s) + FITTED_BASE_S * layers / OPT_13B_LAYERS,
        per_row=FITTED_ROW_S,
        per_context_token=kv_bytes / (gpus * bytes_per_s * KV_READ_SHARE),
        per_prompt_token=2 * params / (gpus * A100_FLOPS),
        swap_s=kv_bytes / (gpus * 25e9),  # PCIe 4.0 x16
    )


OPT_13B = _opt("opt13b-a100", 13e9, 40, 5120, 1, 981 * 16, A100_BYTES_PER_S)
OPT_66B = _opt("opt66b-4xa100", 66e9, 64, 9216, 4, 9_700, A100_BYTES_PER_S)
OPT_175B = _opt("opt175b-8xa100-80gb", 173e9, 96, 12288, 8, 60_100, A100_80GB_BYTES_PER_S)
COSTS = {cost.name: cost for cost in (OPT_13B, OPT_66B, OPT_175B)}


def open_cost(name: str) -> StepCost:
    """Return the cost of that name, or the one in the JSON file of that name, whose keys are the fields of `StepCost`.

    Raises: ValueError for a file with other keys, OSError for a file that cannot be read.
    """
    if name in COSTS:
        return COSTS[name]
    data = json.loads(Path(name).read_text(encoding="utf-8"))
    known = {field.name for field in fields(StepCost)}
    if not isinstance(data, dict) or not known - {"swap_s"} <= data.keys() <= known:
        raise ValueError(f"{name}: a step cost has the keys {', '.join(sorted(known))}")
    return StepCost(**data)
