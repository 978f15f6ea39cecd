"""Linear layers, y = x W^T + b, with the weight laid out for the machine that runs them.

In 8 bits (`--quantization int8`) a weight has one scale per output; embeddings and norms keep their type. Activations
keep theirs with AMX and in float32; with AVX512-VNNI or AVX2 they are quantised to 16 bits, each 512 with a scale.
Each linear layer, the output head included, is quantised as soon as it is read, so the whole model is never in memory
in its stored precision. An output head tied to the embeddings gets 8-bit weights of its own. The same packed weight
serves any number of tokens, and a token's result does not depend on the other tokens, so `deterministic` needs no other
layer.

In FP8 (`--quantization fp8`, or FP8 checkpoints) the layers read 8-bit weights on GPUs. The output head keeps its type,
as its errors would be those of the logits; FP8 checkpoints do the same.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import torch
from chatcache_kernels.experts import ExpertWeights
from chatcache_kernels.fp8 import Fp8Weight
from torch import Tensor
from torch.nn import functional

from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model.attention import FP8_CAPABILITY
from chatcache.model.host_memory import HostArena
from chatcache.model.loading.config_reader import Architecture

log = logging.getLogger(__name__)

Linear = Callable[[Tensor], Tensor]
"""A linear layer: [T, in] -> [T, out]."""

LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""Makes a layer from a weight [out, in] and an optional bias [out]."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("none", "int8", "fp8")
FP8_MULTIPLE = 16  # of the numbers of inputs and outputs


class PanelLinear:
    """A layer whose weight is in panels for small steps; `product` may read another copy.

    `chatcache_kernels.cpu.matmul` defines the panels, and `compact` their copy for steps of few tokens (None: there is
    none). `FusedDecode` and `BlockDecode` use them.
    """

    __slots__ = ("bias", "compact", "panels", "product")

    def __init__(self, product: Linear, panels: Tensor, bias: Tensor | None, compact: Tensor | None = None) -> None:
        self.product, self.panels, self.bias, self.compact = product, panels, bias, compact

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)

    def as_expert(self) -> ExpertWeights:
        """Return the panels as the layer of one expert."""
        from chatcache_kernels.cpu.matmul import PANEL

        bias = None if self.bias is None else self.bias[None]
        num_panels, num_steps = self.panels.shape[:2]
        return ExpertWeights(self.panels[None], bias, num_panels * PANEL, num_steps * PANEL, "panels")


class PanelLinearFactory:
    """Make layers with panels for small steps.

    `has_onednn`: keep a oneDNN layout for many tokens, too, where it is faster; without, panels serve any number of
    tokens. `has_panels`: if False, the oneDNN layout serves all steps that the compact copy does not. `compact_tokens`:
    keep a compact copy, which serves steps of at most so many tokens; 0: keep none.
    """

    def __init__(self, *, has_onednn: bool = False, has_panels: bool = True, compact_tokens: int = 0) -> None:
        self.has_onednn, self.has_panels, self.compact_tokens = has_onednn, has_panels, compact_tokens
        self._num_bytes = self._num_compact_bytes = 0
        self._arena = HostArena()

    @property
    def compact_share(self) -> float:
        """Return the size of the compact copies relative to the weights; 1 without copies."""
        return self._num_compact_bytes / self._num_bytes if self._num_bytes else 1.0

    def compact(self, weights: Tensor) -> Tensor:
        """Return compact copies, see `compact.compact_weights`."""
        from chatcache_kernels.cpu.compact import compact_weights

        copies = compact_weights(weights, self._arena.empty, self.compact_tokens)
        self._num_bytes += weights.nbytes
        self._num_compact_bytes += copies.nbytes
        return copies

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        from chatcache_kernels.cpu.matmul import can_pack, is_fast_for_many, multiply, multiply_few, pack_weight

        if not can_pack(weight):
            return fast_linear(weight, bias)
        compact = self.compact(weight[None])[0] if self.compact_tokens > 0 else None
        if not self.has_panels:
            many, few, num_outputs = fast_linear(weight, bias), compact, len(weight)
            if few is None:
                return many
            return lambda x: multiply_few(x, few, num_outputs, bias) if len(x) <= self.compact_tokens else many(x)
        panels = pack_weight(weight, self._arena.empty)
        if self.has_onednn and not is_fast_for_many(weight.shape[1]):
            return PanelLinear(fast_linear(weight, bias), panels, bias, compact)
        return PanelLinear(lambda x: multiply(x, panels, bias, compact=compact), panels, bias, compact)


def gated_mlp(gate_up: Linear, down: Linear, x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return down(activate(gate_up(x))), in one launch if that is faster; `activate` gets the gates first."""
    if isinstance(gate_up, PanelLinear) and isinstance(down, PanelLinear):
        from chatcache_kernels.cpu import expert_layer, silu_mul

        first, second = gate_up.as_expert(), down.as_expert()
        tile_tokens = expert_layer.choose_mlp_tokens(len(x), first.num_inputs, second.num_inputs)
        if activate is silu_mul and tile_tokens > 0:
            return expert_layer.gated_mlp(x, first, second, tile_tokens)
    return down(activate(gate_up(x)))


MEASURED_INPUTS, MEASURED_OUTPUTS = 2048, 1024  # of the part that is repeated
MAX_MEASURED_BYTES = 256 * 2**20
CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # Linux: "32768K"
MIN_GAIN = 1.03  # of compact weights, which take memory
MEASURED_ROUNDS = 9


@cache
def measure_compact_tokens(has_panels: bool, model_bytes: int) -> int:
    """Return up to how many tokens this machine multiplies faster with compact weights; 0 if it never does.

    `has_panels`: compare with panels, else with the oneDNN layout. Where the memory is fast for what the cores compute,
    restoring the numbers takes longer than reading them. Takes 0.2 to 0.5 s, and three times the memory of a weight
    that is twice as large as the last-level cache, but not larger than the model or MAX_MEASURED_BYTES.
    """
    from chatcache_kernels.cpu.compact import FEW_TOKENS, compact_weights
    from chatcache_kernels.cpu.matmul import multiply, multiply_few, pack_weight

    part = torch.randn(MEASURED_OUTPUTS, MEASURED_INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    num_bytes = min(2 * _cache_bytes(), MAX_MEASURED_BYTES, model_bytes)
    weight = part.repeat(-(-num_bytes // part.nbytes), 1)
    compact = compact_weights(weight[None])[0]
    layers = [
        partial(multiply_few, compact=compact, num_outputs=len(weight)),
        partial(multiply, packed=pack_weight(weight)) if has_panels else fast_linear(weight),
    ]
    counts, gains = [2**power for power in range(FEW_TOKENS.bit_length())], []
    for count in counts:
        x = torch.ones(count, MEASURED_INPUTS, dtype=torch.bfloat16)
        rounds = [[_seconds(layer, x) for layer in layers] for _ in range(MEASURED_ROUNDS)]
        gains.append(statistics.median(other / few for few, other in rounds) - MIN_GAIN)
    gain, most = max(zip(accumulate(gains), counts, strict=True))
    return most if gain > 0 else 0


def _cache_bytes() -> int:
    """Return the size of the last-level cache; 32 MiB if it is unknown."""
    try:
        return int(CACHE_SIZE.read_text().strip().removesuffix("K")) * 2**10
    except (OSError, ValueError):
        return 32 * 2**20


def _seconds(layer: Linear, x: Tensor) -> float:
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


def fast_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a linear layer for inference.

    On CPUs, oneDNN reorders the weight once, which makes it 1.5 to 3 times as fast as `F.linear` at small T. The plain
    weight is kept if that operator is missing or disagrees with `F.linear`.
    """
    return packed_linear(weight, bias) or (lambda x: functional.linear(x, weight, bias))


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear | None:
    """Return a layer over a weight reordered by oneDNN, None if that fails or is inaccurate.

    The layer does not reference the original weight.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    multiply = torch.ops.mkldnn._linear_pointwise
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        probe = torch.linspace(-1.0, 1.0, weight.shape[1], dtype=torch.float32).to(weight.dtype)[None]
        got = multiply(probe, packed, bias, "none", [], "").float()
        want = functional.linear(probe, weight, bias).float()
    except RuntimeError as error:
        log.info("oneDNN cannot pack a weight %s: %s", tuple(weight.shape), error)
        return None
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    if not (got - want).abs().max() <= tolerance * want.abs().max().clamp(min=1.0):
        return None

    def product(x: Tensor) -> Tensor:
        out: Tensor = multiply(x, packed, bias, "none", [], "")
        return out

    return product


class Int8Linear:
    """A linear layer with 8-bit weights, packed for activations of the weight's dtype.

    Shapes: codes, scales as in `chatcache_kernels.cpu.int8`; bias [out].
    """

    __slots__ = ("bias", "codes", "is_unpadded", "scales", "unit")

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: HostArena) -> None:
        from chatcache_kernels.cpu.int8 import choose_unit, pack_numbers, quantise

        numbers, self.scales = quantise(weight)
        self.unit = choose_unit(weight.dtype)
        self.codes = arena.copy(pack_numbers(numbers, self.unit))
        self.bias = None if bias is None else bias.float()
        self.is_unpadded = self.codes.numel() == weight.numel()  # the panels needed no padding

    def __call__(self, x: Tensor) -> Tensor:
        from chatcache_kernels.cpu.int8 import multiply

        return multiply(x, self.codes, self.scales, self.bias, self.unit)


class Int8LinearFactory:
    """Make the 8-bit layers of one model and count their weights and bytes."""

    def __init__(self) -> None:
        self.num_weights = self.num_bytes = 0
        self._arena = HostArena()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        layer = Int8Linear(weight, bias, self._arena)
        self.num_weights += weight.numel()
        self.num_bytes += layer.codes.nbytes + layer.scales.nbytes
        return layer


class Fp8Linear:
    """A linear layer with FP8 weights; `chatcache_kernels.triton.fp8` computes it. Shapes: bias [out]."""

    __slots__ = ("bias", "locks", "weight")

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        from chatcache_kernels.triton.fp8 import num_locks

        self.weight, self.bias = weight, bias
        self.locks = torch.zeros(num_locks(weight), dtype=torch.int32, device=weight.numbers.device)

    def __call__(self, x: Tensor) -> Tensor:
        from chatcache_kernels.triton.fp8 import FEW_ROWS, multiply, multiply_few_rows

        if len(x) <= FEW_ROWS:
            return multiply_few_rows(x, self.weight, self.bias, self.locks)
        return multiply(x, self.weight, self.bias)


class Fp8LinearFactory:
    """Make the FP8 layers of one model and count their weights and bytes.

    `quantises`: quantise weights; otherwise only those that are FP8 already run as such. Weights whose sizes the
    products do not support keep their type.
    """

    def __init__(self, *, quantises: bool) -> None:
        self.num_weights = self.num_bytes = 0
        self._quantises = quantises

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        from chatcache_kernels.triton.fp8 import quantise_rows

        num_outputs, num_inputs = weight.shape
        if not self._quantises or num_outputs % FP8_MULTIPLE or num_inputs % FP8_MULTIPLE:
            return fast_linear(weight, bias)
        return self.pack(Fp8Weight(*quantise_rows(weight, num_inputs), 1, num_inputs), bias)

    def can_pack(self, weight: Fp8Weight) -> bool:
        """Return whether the products support the sizes of a weight and its blocks."""
        from chatcache_kernels.triton.fp8 import BLOCK_K

        sizes = (weight.num_outputs, weight.num_inputs)
        return not any(size % FP8_MULTIPLE for size in sizes) and weight.columns in (weight.num_inputs, BLOCK_K)

    def pack(self, weight: Fp8Weight, bias: Tensor | None) -> Fp8Linear:
        """Return the layer of an FP8 weight."""
        self.num_weights += weight.numbers.numel()
        self.num_bytes += weight.num_bytes
        return Fp8Linear(weight, bias)


def head_factory(make_linear: LinearFactory) -> LinearFactory:
    """Return the factory of the output head in a model with these layers."""
    return fast_linear if isinstance(make_linear, Fp8LinearFactory) else make_linear


def fp8_problem(backend: str, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False) -> str:
    """Return the reason why FP8 weights cannot be multiplied, "" if they can.

    `backend`: name of the attention backend, whose kernels compute the products.
    """
    if deterministic:
        return "FP8 products depend on the number of tokens, and deterministic is set"
    if backend != "triton":
        return f"FP8 products need the attention backend 'triton', and on {device} that is {backend!r}"
    if device.type != "cuda":
        return ""  # Triton's interpreter
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        return f"FP8 products need compute capability 8.9, and {device} has {capability[0]}.{capability[1]}"
    return "" if dtype == torch.bfloat16 else f"FP8 products need dtype bfloat16, and it is {dtype}"


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the compute dtype.

    auto is bfloat16 on GPUs and on x86 CPUs with AVX2, where our kernels widen the weights if the CPU has no bf16
    products: a decode step then reads half as much. It is float32 on other CPUs, and on those without bf16 products
    where torch or oneDNN would have to multiply: in deterministic mode, and with other attention backends.
    Raises: ModelFolderError for a type that does not exist, or float16 on a CPU.
    """
    name = config.dtype
    if name == "auto":
        flags = _cpu_flags() if device.type == "cpu" else set()
        widens = "avx2" in flags and config.attention_backend in ("auto", "cpu") and not config.deterministic
        has_products = device.type == "cuda" or not flags.isdisjoint(("avx512_bf16", "amx_bf16"))
        return torch.bfloat16 if has_products or widens else torch.float32
    if name not in DTYPES:
        raise ModelFolderError(f"dtype {name!r} is not supported; choose auto or {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ModelFolderError("dtype 'float16' needs a GPU; choose auto, float32 or bfloat16")
    return DTYPES[name]


def _cpu_flags() -> set[str]:
    """Return the extensions of an x86 CPU; empty on other systems and CPUs."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line.split() for line in text.splitlines() if line.startswith("flags")), []))


def choose_quantization(name: str, problem: str, *, is_fp8: bool) -> str:
    """Return the quantization that a model runs with, none | int8 | fp8.

    `name`: as configured. `problem`: why the device cannot multiply FP8 numbers, "" if it can. `is_fp8`: whether
    the weights of the folder are FP8; they are dequantised where they cannot run as they are.
    Raises: ModelFolderError for fp8 on a device that does not support it.
    """
    if name == "fp8" and problem and not is_fp8:
        raise ModelFolderError(f"quantization fp8: {problem}; choose none, or int8 on a CPU")
    if name == "int8" or not is_fp8:
        return name
    if problem:
        log.warning("FP8 weights are dequantised: %s", problem)
        return "none"
    return "fp8"


def check_quantization(name: str, device: torch.device) -> None:
    """Check the value of `--quantization`; see `fp8_problem` for fp8.

    Raises: ModelFolderError for a value that does not exist, or int8 on a device that does not support it.
    """
    if name not in QUANTIZATIONS:
        raise ModelFolderError(f"quantization {name!r} is not supported; choose none, int8 or fp8")
    if name == "int8" and device.type != "cpu":
        raise ModelFolderError(
            f"quantization {name} works on CPUs only, and this model would run on {device}; choose none or fp8"
        )


def weight_sizes(
    num_parameters: int,
    dtype: torch.dtype,
    arch: Architecture | None,
    make_linear: LinearFactory | None = None,
    idle_bytes: int = 0,
) -> tuple[int, int]:
    """Return the bytes of all weights and the bytes of weights that a step of one token reads.

    Second layouts are not counted, but a step reads compact copies instead of weights. It reads all weights except an
    embedding table that is not also the output head. `arch` is None for a model that runs through transformers, whose
    embedding table is counted as read, and which does not read `idle_bytes` of its experts.
    """
    held = num_parameters * dtype.itemsize
    packed = make_linear if isinstance(make_linear, Int8LinearFactory | Fp8LinearFactory) else None
    share = make_linear.compact_share if isinstance(make_linear, PanelLinearFactory) else 1.0
    if arch is None:
        if packed is not None:
            held -= max(0, packed.num_weights * dtype.itemsize - packed.num_bytes)
        return held, round(share * (held - idle_bytes))
    table = arch.vocab_size * arch.hidden_size
    is_shared = arch.tied and not isinstance(make_linear, Int8LinearFactory)  # a packed head is a second copy
    if packed is not None:
        num_replaced = packed.num_weights - (table if arch.tied and not is_shared else 0)
        held += packed.num_bytes - num_replaced * dtype.itemsize
    return held, round(share * (held - (0 if is_shared else table * dtype.itemsize)))
