"""Memory-mapped safetensors files, with every length checked before data is read.

File: 8 bytes little-endian header length N | N bytes of JSON {name: {dtype, shape, data_offsets}} | tensor data.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.loading.files import INDEX, read_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
MAX_HEADER_BYTES = 100 * 1024 * 1024
WHOLE_FILE_DIGEST_BYTES = 64 * 1024 * 1024
SAMPLE_BYTES = 1024
EXPONENTS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # without infinities: only NaN has all bits of its mantissa set, too
}
CHUNK = 1 << 18


Part = Callable[[Tensor], Tensor]
"""Selects the part of a tensor to return."""


class WeightSource(Protocol):
    """A model's tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def num_parameters(self) -> int: ...

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return one tensor, or a part of it; the caller must copy it to keep it.

        Raises: ModelFolderError if there is no such tensor of this shape.
        """
        ...

    def digest(self) -> str:
        """Return a hex digest that identifies the contents of the tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `view` holds its bytes."""

    file: Path
    view: memoryview
    dtype: torch.dtype
    shape: tuple[int, ...]


class BaseModelWeights:
    """Tensors of a base model under the names of a causal LM: `model.x` for `x`.

    Embedding models are often saved without their output head, and so without that prefix. The embeddings take its
    place, as if they were tied: only the hidden states of such a model mean something.
    """

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self.num_parameters = weights.num_parameters

    def __contains__(self, name: str) -> bool:
        return name.startswith("model.") and name.removeprefix("model.") in self._weights

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return one tensor. Raises: as `WeightSource.get`."""
        if name == "lm_head.weight" and name not in self._weights:
            name = "embed_tokens.weight"
        return self._weights.get(name.removeprefix("model."), shape, part)

    def digest(self) -> str:
        """Return the digest of the tensors."""
        return self._weights.digest()


def as_causal_lm(weights: WeightSource) -> WeightSource:
    """Return weights under the names of a causal LM, also for those of a base model."""
    is_base = "embed_tokens.weight" in weights and "model.embed_tokens.weight" not in weights
    return BaseModelWeights(weights) if is_base else weights


class Weights:
    """All tensors of a model folder by name.

    Tensors share the memory-mapped file: copy before keeping or changing them.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self._entries: dict[str, Entry] = {}
        self._headers: list[bytes] = []
        self._data: list[memoryview] = []
        self._replaced: dict[str, Path] = {}
        for path in files:
            self._map(path)
        if self._replaced:
            self._check_replaced(read_json(files[0].parent / INDEX)["weight_map"])

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> Iterator[str]:
        """Yield every tensor name."""
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that exists."""
        return self._entries[name].shape

    @property
    def num_parameters(self) -> int:
        """Return the number of stored elements."""
        return self.count_parameters(lambda name: True)

    def count_parameters(self, is_counted: Callable[[str], bool]) -> int:
        """Return the number of elements of the tensors whose names satisfy `is_counted`."""
        return sum(math.prod(entry.shape) for name, entry in self._entries.items() if is_counted(name))

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return a tensor that is a view of the file. Of a `part`, only the elements in it are read.

        Raises: ModelFolderError if it is missing, has another shape, is not of a float type or not finite.
        """
        entry = self._entries.get(name)
        if entry is None:
            where = self.files[0] if len(self.files) == 1 else self.files[0].parent
            raise ModelFolderError(f"{where}: tensor {name} is missing")
        if entry.shape != shape:
            raise ModelFolderError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        if not entry.dtype.is_floating_point:
            raise ModelFolderError(f"{entry.file}: tensor {name} is {entry.dtype}; quantised weights are not supported")
        if not entry.view:
            raise ModelFolderError(f"{entry.file}: tensor {name} is empty")
        tensor = torch.frombuffer(entry.view, dtype=entry.dtype).view(shape)
        tensor = tensor if part is None else part(tensor)
        if not is_finite(tensor):
            raise ModelFolderError(f"{entry.file}: tensor {name} contains NaN or infinity")
        return tensor

    def digest(self) -> str:
        """Return a hex digest of headers and contents.

        Files of up to 64 MiB are hashed whole, larger ones by samples of every tensor.
        """
        hasher = hashlib.sha256()
        for header, data in zip(self._headers, self._data, strict=True):
            hasher.update(header)
            if len(data) <= WHOLE_FILE_DIGEST_BYTES:
                hasher.update(data)
        for name in sorted(self._entries):
            view = self._entries[name].view
            middle = len(view) // 2
            for start in (0, middle, max(0, len(view) - SAMPLE_BYTES)):
                hasher.update(view[start : start + SAMPLE_BYTES])
        return hasher.hexdigest()

    def _map(self, path: Path) -> None:
        size = path.stat().st_size
        if size < 8:
            raise ModelFolderError(f"{path}: truncated, {size} bytes is too short for safetensors")
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))  # private: never written back
        length = int.from_bytes(mapped[:8], "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelFolderError(f"{path}: not safetensors or truncated: header of {length} bytes in {size}")
        raw = bytes(mapped[8 : 8 + length])
        try:
            header = json.loads(raw, object_pairs_hook=_reject_duplicates)
        except (ValueError, RecursionError) as error:
            raise ModelFolderError(f"{path}: not safetensors, its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise ModelFolderError(f"{path}: not safetensors, its header is not a JSON object")
        data = mapped[8 + length :]
        header.pop("__metadata__", None)
        for name, fields in header.items():
            if name in self._entries:
                self._replaced[name] = self._entries[name].file
            self._entries[name] = _entry(path, name, fields, data)
        _check_layout(path, header, len(data))
        self._headers.append(raw)
        self._data.append(data)

    def _check_replaced(self, shards: dict[str, str]) -> None:
        """Verify that the index names the last of several files with a tensor, which is the one transformers reads.

        Raises: ModelFolderError, since another one would be read than the index or transformers selects.
        """
        for name, other in self._replaced.items():
            file = self._entries[name].file
            if shards.get(name) != file.name:
                raise ModelFolderError(
                    f"{file}: tensor {name} is in {other.name} too, and {INDEX} does not say {file.name}, the last"
                )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor in host memory are finite.

    An element is not finite if all bits of its exponent are set.
    """
    exponent = EXPONENTS.get(tensor.dtype)
    if exponent is None:
        return bool(tensor.to(torch.float32).isfinite().all())
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    bits = tensor.detach().contiguous().view(-1).view(whole).numpy().view(f"u{tensor.itemsize}")
    buffer = np.empty(min(CHUNK, bits.size), bits.dtype)
    for start in range(0, bits.size, CHUNK):
        part = bits[start : start + CHUNK]
        if np.bitwise_and(part, bits.dtype.type(exponent), out=buffer[: part.size]).max() == exponent:
            return False
    return True


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check_layout(path: Path, header: dict[str, Any], num_bytes: int) -> None:
    """Verify that the tensors cover the data without gaps or overlaps, as safetensors requires."""
    end, before = 0, ""
    for begin, last, name in sorted((*fields["data_offsets"], name) for name, fields in header.items()):
        if begin != end:
            how = "overlaps" if begin < end else "leaves a gap after"
            raise ModelFolderError(f"{path}: tensor {name} {how} {before or 'the header'}, at byte {begin} of the data")
        end, before = last, name
    if end != num_bytes:
        raise ModelFolderError(f"{path}: {num_bytes - end} bytes after the last tensor belong to no tensor")


def _entry(path: Path, name: str, fields: Any, data: memoryview) -> Entry:
    try:
        dtype, shape, (begin, end) = DTYPES[fields["dtype"]], tuple(fields["shape"]), fields["data_offsets"]
        if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)):
            raise ValueError
    except KeyError as error:
        raise ModelFolderError(f"{path}: tensor {name}: unknown or missing {error}") from error
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"{path}: tensor {name}: malformed header entry") from error
    num_bytes = math.prod(shape) * dtype.itemsize
    if not begin <= end <= len(data):
        raise ModelFolderError(f"{path}: truncated: tensor {name} ends at byte {end} of {len(data)}")
    if end - begin != num_bytes:
        raise ModelFolderError(f"{path}: tensor {name}: {end - begin} bytes for shape {list(shape)} of {dtype}")
    return Entry(path, data[begin:end], dtype, shape)
