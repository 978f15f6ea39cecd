"""Integer checkpoints (GPTQ, AWQ, compressed-tensors): how `config.json` describes them, and their tensors.

    format           numbers of a weight [out, in]              zero points               scales
    gptq             qweight int32 [in / n, out]                qzeros [groups, out / n]  scales [groups, out]
    awq              qweight int32 [in, out / n], interleaved   qzeros [groups, out / n]  scales [groups, out]
    pack-quantized   weight_packed int32 [out, in / n]          weight_zero_point         weight_scale [out, groups]
    int-quantized    weight int8 [out, in]                      weight_zero_point         weight_scale [out, groups]

A 32-bit word holds n = 32 / bits numbers, the first one in its lowest bits. A weight is (number - zero point) x scale
of its output and group; a group is so many consecutive inputs, or those that `g_idx` assigns to it. Weights are
expanded as they are read, so such a model computes as its unquantised version does. Scales of activations are not read.
Modules that a checkpoint leaves unquantised have a plain weight.

Sources: Frantar et al., GPTQ (ICLR 2023), with the file format of AutoGPTQ; Lin et al., AWQ (MLSys 2024), with the
"gemm" format of AutoAWQ; the compressed-tensors specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.loading.files import weight_files
from chatcache.model.loading.fp8_weights import FIELD
from chatcache.model.loading.weights import Part, Weights

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of the numbers of a word belongs to its first output, its second, ...
GPTQ_FORMATS = {None: 1, "gptq": 1, "gptq_v2": 0}  # what is added to the stored zero points
COMPRESSED_TENSORS_FORMATS = ("pack-quantized", "int-quantized")
UNREAD = ("weight_shape", "input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")


class TensorNames(NamedTuple):
    """What follows the name of a module in the names of its tensors."""

    numbers: str
    scales: str
    zeros: str
    groups: str


TENSORS = {
    "gptq": TensorNames("qweight", "scales", "qzeros", "g_idx"),
    "awq": TensorNames("qweight", "scales", "qzeros", "g_idx"),
    "pack-quantized": TensorNames("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "int-quantized": TensorNames("weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
}


@dataclass(frozen=True, slots=True)
class IntFormat:
    """`name`: see the module. `group_size`: inputs that share a scale, None for all. `zero_offset`: GPTQ_FORMATS."""

    name: str
    bits: int
    group_size: int | None
    zero_offset: int = 0


def read_int_format(config: dict[str, Any], where: Path) -> IntFormat | None:
    """Return the format of an integer checkpoint, None if the weights are not in such a format.

    Raises: ModelFolderError naming the field whose value is invalid or not supported.
    """
    fields = config.get(FIELD)
    if not isinstance(fields, dict):
        return None
    method = fields.get("quant_method")
    name = f"{where}: {FIELD}"
    if method == "gptq":
        _check(f"{name}.dynamic", not fields.get("dynamic"), "per-module settings are not supported")
        _check_one_of(f"{name}.checkpoint_format", fields.get("checkpoint_format"), tuple(GPTQ_FORMATS))
        _check_one_of(f"{name}.bits", fields.get("bits"), (2, 4, 8))
        offset = GPTQ_FORMATS[fields.get("checkpoint_format")]
        return IntFormat("gptq", fields["bits"], _group_size(f"{name}.group_size", fields.get("group_size")), offset)
    if method == "awq":
        _check_one_of(f"{name}.version", str(fields.get("version", "gemm")).lower(), ("gemm",))
        _check_one_of(f"{name}.bits", fields.get("bits", fields.get("w_bit")), (4,))
        size = fields.get("group_size", fields.get("q_group_size"))
        return IntFormat("awq", 4, _group_size(f"{name}.group_size", size))
    if method == "compressed-tensors":
        return _read_compressed_tensors(fields, name)
    return None


def _read_compressed_tensors(fields: dict[str, Any], name: str) -> IntFormat | None:
    where = f"{name}.config_groups.weights"
    groups = fields.get("config_groups")
    groups = [_object(f"{name}.config_groups", group) for group in groups.values()] if isinstance(groups, dict) else []
    schemes = [_object(where, group["weights"]) for group in groups if group.get("weights") is not None]
    is_read = fields.get("format") in COMPRESSED_TENSORS_FORMATS
    if not schemes or not is_read or any(each.get("type") != "int" for each in schemes):
        return None
    _check(f"{name}.transform_config", not fields.get("transform_config"), "rotated weights are not supported")
    sparsity = _object(f"{name}.sparsity_config", fields.get("sparsity_config") or {}).get("format", "dense")
    _check_one_of(f"{name}.sparsity_config.format", sparsity, ("dense",))
    scheme = schemes[0]
    are_equal = all(each.get(key) == scheme.get(key) for each in schemes for key in ("num_bits", "group_size"))
    _check(where, are_equal, "they must be equal")
    _check_one_of(f"{where}.strategy", scheme.get("strategy"), ("group", "channel", "tensor"))
    _check_one_of(
        f"{where}.num_bits", scheme.get("num_bits"), (8,) if fields["format"] == "int-quantized" else (2, 4, 8)
    )
    size = _group_size(f"{where}.group_size", scheme.get("group_size")) if scheme["strategy"] == "group" else None
    return IntFormat(fields["format"], scheme["num_bits"], size)


def _group_size(name: str, value: Any) -> int | None:
    is_size = type(value) is int and (value > 0 or value == -1)
    _check(name, value is None or is_size, f"must be a positive integer or -1, got {value!r:.60}")
    return None if value in (None, -1) else int(value)


def _object(name: str, value: Any) -> dict[str, Any]:
    _check(name, isinstance(value, dict), f"must be an object, got {value!r:.60}")
    return cast("dict[str, Any]", value)


def _check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    listed = ", ".join(str(each) for each in allowed if each is not None)
    is_allowed = any(type(value) is type(each) and value == each for each in allowed)  # 4.0 is not 4
    _check(name, is_allowed, f"{value!r:.60} is not supported; supported: {listed}")


def _check(name: str, is_valid: bool, problem: str) -> None:
    if not is_valid:
        raise ModelFolderError(f"{name}: {problem}")


def open_weights(folder: Path, config: dict[str, Any]) -> Weights:
    """Open the tensors of a model folder; those of an integer checkpoint are expanded to float32 as they are read."""
    layout = read_int_format(config, folder / "config.json")
    files = weight_files(folder)
    return Weights(files) if layout is None else IntWeights(files, layout)


class IntWeights(Weights):
    """Tensors of an integer checkpoint under the names and with the shapes of the unquantised model."""

    def __init__(self, files: tuple[Path, ...], layout: IntFormat) -> None:
        super().__init__(files)
        self._layout = layout
        self._kinds = kinds = TENSORS[layout.name]
        stored = dict.fromkeys(super().names())
        self._modules: dict[str, str] = {}  # by the name of the weight
        for name in stored:
            module, _, kind = name.rpartition(".")
            if kind == kinds.numbers and f"{module}.{kinds.scales}" in stored:
                self._modules[f"{module}.weight"] = module
        parts = {f"{module}.{kind}" for module in self._modules.values() for kind in kinds}
        self._plain = [name for name in stored if name not in parts and name.rpartition(".")[2] not in UNREAD]
        self._names = {*self._modules, *self._plain}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> Iterator[str]:
        """Yield the name of every tensor of the unquantised model."""
        yield from self._modules
        yield from self._plain

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the unquantised model that exists."""
        module = self._modules.get(name)
        if module is None:
            return super().shape(name)
        stored = super().shape(f"{module}.{self._kinds.numbers}")
        if len(stored) != 2:
            return stored
        num_rows, num_columns, num_packed = *stored, WORD_BITS // self._layout.bits
        if self._layout.name == "gptq":
            return num_columns, num_rows * num_packed
        if self._layout.name == "awq":
            return num_columns * num_packed, num_rows
        return num_rows, num_columns * (num_packed if self._layout.name == "pack-quantized" else 1)

    def count_parameters(self, is_counted: Callable[[str], bool]) -> int:
        """Return the number of elements of the tensors whose names satisfy `is_counted`, expanded."""
        return sum(math.prod(self.shape(name)) for name in self.names() if is_counted(name))

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return one tensor, expanded to float32 if it is quantised.

        Raises: ModelFolderError as `Weights.get`, and for tensors of the quantised weight that do not fit together.
        """
        module = self._modules.get(name)
        if module is None:
            return super().get(name, shape, part)
        found = self.shape(name)
        if found != shape:
            raise ModelFolderError(
                f"{self.files[0].parent}: the quantised tensor {name} has shape {list(found)}, config.json asks for "
                f"{list(shape)}"
            )
        if len(shape) != 2:
            raise ModelFolderError(
                f"{self.files[0].parent}: the quantised tensor {name} has {len(shape)} dimensions; expected two"
            )
        weight = self._expand(module, *shape)
        return weight if part is None else part(weight)

    def expand_all(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors, the expanded ones in `dtype`. Raises: as `get`."""
        return {
            name: tensor.to(dtype) if name in self._modules else tensor
            for name in self.names()
            for tensor in (self.get(name, self.shape(name)),)
        }

    def _expand(self, module: str, num_outputs: int, num_inputs: int) -> Tensor:
        layout, kinds = self._layout, self._kinds
        size = layout.group_size or num_inputs
        num_groups = -(-num_inputs // size)
        numbers = self._numbers(f"{module}.{kinds.numbers}")
        scales, zeros = self._scales(module, num_outputs, num_groups), self._zeros(module, num_outputs, num_groups)
        groups = self._groups(f"{module}.{kinds.groups}", num_inputs, size, num_groups)
        weight = numbers.to(torch.float32)
        if zeros is not None:
            weight -= zeros.to(torch.float32)[:, groups]
        return weight.mul_(scales[:, groups])

    def _numbers(self, name: str) -> Tensor:
        """Return the numbers of a weight, [out, in]; those of compressed-tensors are signed."""
        bits = self._layout.bits
        if self._layout.name == "int-quantized":
            return self._integers(name, torch.int8)
        stored = self._words(name)
        if self._layout.name == "gptq":
            return _unpack(stored.T, bits)
        if self._layout.name == "awq":
            return _unpack_awq(stored).T
        return _unpack(stored, bits).to(torch.int16).sub_(2 ** (bits - 1))

    def _scales(self, module: str, num_outputs: int, num_groups: int) -> Tensor:
        name = f"{module}.{self._kinds.scales}"
        stored = super().get(name, super().shape(name)).float()
        if self._layout.name in ("gptq", "awq"):
            return self._fitting(name, stored, (num_groups, num_outputs)).T
        if num_groups == 1 and stored.numel() in (1, num_outputs):  # of all outputs, or [out]
            return stored.reshape(-1, 1).expand(num_outputs, 1)
        return self._fitting(name, stored, (num_outputs, num_groups))

    def _zeros(self, module: str, num_outputs: int, num_groups: int) -> Tensor | None:
        """Return the zero points, [out, groups]; None for 0."""
        layout, name = self._layout, f"{module}.{self._kinds.zeros}"
        shape = num_outputs, num_groups
        if name not in self._entries and layout.name in ("pack-quantized", "int-quantized"):
            return None
        if layout.name == "gptq":
            unpacked = _unpack(self._words(name), layout.bits).T + layout.zero_offset
            return self._fitting(name, unpacked & (2**layout.bits - 1), shape)
        if layout.name == "awq":
            return self._fitting(name, _unpack_awq(self._words(name)).T, shape)
        if self._entries[name].dtype == torch.int32:
            unpacked = _unpack(self._words(name).T, layout.bits).T[:num_outputs].to(torch.int16)
            return self._fitting(name, unpacked - 2 ** (layout.bits - 1), shape)
        stored = self._integers(name, torch.int8)
        if stored.numel() in (num_groups, math.prod(shape)):  # the former: of all outputs
            stored = stored.reshape(-1, num_groups).expand(shape)
        return self._fitting(name, stored, shape)

    def _groups(self, name: str, num_inputs: int, size: int, num_groups: int) -> Tensor:
        """Return the group of each input."""
        if name not in self._entries:
            return torch.arange(num_inputs) // size
        groups = self._fitting(name, self._integers(name, torch.int32, torch.int64).long(), (num_inputs,))
        if groups.min() < 0 or groups.max() >= num_groups:
            raise ModelFolderError(f"{self.files[0].parent}: tensor {name} names groups outside 0 to {num_groups - 1}")
        return groups

    def _words(self, name: str) -> Tensor:
        """Return packed integers as stored. Raises: as `_integers`, and if they have not two dimensions."""
        words = self._integers(name, torch.int32)
        if words.dim() != 2:
            raise ModelFolderError(
                f"{self.files[0].parent}: tensor {name} has {words.dim()} dimensions; expected packed integers in two"
            )
        return words

    def _integers(self, name: str, *dtypes: torch.dtype) -> Tensor:
        """Return an integer tensor as stored. Raises: ModelFolderError if it is missing, empty or of another type."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFolderError(f"{self.files[0].parent}: tensor {name} is missing")
        if entry.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise ModelFolderError(f"{entry.file}: tensor {name} is {entry.dtype}; expected {expected}")
        if not entry.view:
            raise ModelFolderError(f"{entry.file}: tensor {name} is empty")
        return torch.frombuffer(entry.view, dtype=entry.dtype).view(entry.shape)

    def _fitting(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tensor.shape != shape:
            raise ModelFolderError(
                f"{self.files[0].parent}: tensor {name} holds {list(tensor.shape)} values, expected {list(shape)}"
            )
        return tensor


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 32 / bits]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 8], in the order of the outputs."""
    numbers = _unpack(words, 4).view(len(words), -1, len(AWQ_ORDER))
    return numbers[..., list(AWQ_ORDER)].flatten(1)
