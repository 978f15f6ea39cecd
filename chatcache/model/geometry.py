"""Sizes of a network that determine its page stores, its work lists and its logits.

Layers may differ in heads and head sizes. Layers that keep keys and values of equal shape share one page store; one
page id names a page of every store:

    layer    0: 4 x 64   1: 4 x 64   2: 1 x 128   3: reads the keys of 1
    place    store 0, 0  store 0, 1  store 1, 0   store 0, 1 (not written)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.fp8 import SCALE_BYTES

from chatcache.errors import ModelFolderError
from chatcache.model.states import StateShape


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the keys, and of the values, that a layer keeps for each token.

    `rank`: the layer keeps a latent of so many dimensions, followed by a rotary key, as its only head of `head_dim`
    dimensions and without values; None for keys and values.
    """

    num_kv_heads: int
    head_dim: int
    rank: int | None = None

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token: its keys and values, or its latent, in one layer."""
        head_bytes = self.head_dim * dtype.itemsize + (SCALE_BYTES if dtype == FP8 else 0)
        return (2 if self.rank is None else 1) * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class WorkForm:
    """What the attention batch of a layer depends on, besides the rows of the step.

    `group`: how many query heads share one key/value head. `chunk`: as in `AttentionLayer`.
    """

    group: int = 1
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Heads of one attention layer.

    `chunk`: a token sees only the keys of its own chunk of so many positions, counted from position 0. `kv_layer`: the
    earlier layer whose keys and values it reads; None if it keeps its own.
    """

    num_heads: int
    kv: KVShape
    chunk: int | None = None
    kv_layer: int | None = None

    @property
    def form(self) -> WorkForm:
        """Return what its attention batch depends on."""
        return WorkForm(self.num_heads // self.kv.num_kv_heads, self.chunk)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer finds its keys and values, and its attention batch.

    `store`: index of the page store; `index`: of the layer in that store; `form`: of the batch. `has_own_kv`: whether
    the layer writes keys and values.
    """

    store: int
    index: int
    form: int
    has_own_kv: bool


@dataclass(frozen=True, slots=True)
class StoreShape:
    """Shape of one page store."""

    kv: KVShape
    num_layers: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers and sizes of a network.

    `layers`: one entry per layer, None for a layer without attention. `hidden_size`: of the final hidden states, 0 if
    the network cannot return them. `state_shapes`: the tensors that its recurrent and convolution layers keep per
    branch; a network that has any must return its hidden states. `kv_dtype`: of the numbers in pages, None for `dtype`.
    The remaining fields follow from `layers`; forms with chunks come last.
    """

    layers: tuple[AttentionLayer | None, ...]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    hidden_size: int = 0
    state_shapes: tuple[StateShape, ...] = ()
    kv_dtype: torch.dtype | None = None
    stores: tuple[StoreShape, ...] = field(init=False)
    forms: tuple[WorkForm, ...] = field(init=False)
    places: tuple[LayerPlace | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Divide the layers among stores and forms."""
        counts: dict[KVShape, int] = {}
        distinct = dict.fromkeys(layer.form for layer in self.layers if layer is not None)
        forms = sorted(distinct, key=lambda form: form.chunk is not None)
        places: list[LayerPlace | None] = []
        for layer in self.layers:
            if layer is None:
                places.append(None)
                continue
            form = forms.index(layer.form)
            source = None if layer.kv_layer is None else places[layer.kv_layer]
            if source is None:
                index = counts.get(layer.kv, 0)
                counts[layer.kv] = index + 1
                places.append(LayerPlace(list(counts).index(layer.kv), index, form, has_own_kv=True))
            else:
                places.append(LayerPlace(source.store, source.index, form, has_own_kv=False))
        stores = tuple(StoreShape(kv, count) for kv, count in counts.items())
        for name, value in (("stores", stores), ("forms", tuple(forms)), ("places", tuple(places))):
            object.__setattr__(self, name, value)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden_size: int = 0,
    ) -> Geometry:
        """Return the geometry of a network whose layers are all alike."""
        layer = AttentionLayer(num_heads, KVShape(num_kv_heads, head_dim))
        return cls((layer,) * num_layers, vocab_size, dtype, device, hidden_size)

    @property
    def query_elements(self) -> int:
        """Return the largest number of query elements of a token in one layer, and one more per head."""
        return max(layer.num_heads * (layer.kv.head_dim + 1) for layer in self.layers if layer is not None)

    @property
    def has_chunks(self) -> bool:
        """Return whether a layer attends in chunks."""
        return any(form.chunk is not None for form in self.forms)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one state."""
        return sum(shape.num_bytes for shape in self.state_shapes)

    def with_kv_cache_dtype(self, name: str) -> Geometry:
        """Return the same network with pages of a `kv_cache_dtype`, auto | fp8.

        Raises: ModelFolderError for latent attention, which has no FP8 pages.
        """
        if name == "auto":
            return self
        if any(store.kv.rank is not None for store in self.stores):
            reason = "does not work with latent attention, whose pages hold no heads"
            raise ModelFolderError(f"kv_cache_dtype {name!r} {reason}; choose auto")
        return replace(self, kv_dtype=FP8)

    @property
    def page_dtype(self) -> torch.dtype:
        """Return the dtype of the numbers in pages."""
        return self.kv_dtype or self.dtype

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page: keys and values of all layers."""
        return sum(page_size * store.num_layers * store.kv.token_bytes(self.page_dtype) for store in self.stores)

    def page_size_problem(self, page_size: int) -> str:
        """Return the reason why pages cannot have `page_size` tokens, "" if they can."""
        chunks = [form.chunk for form in self.forms if form.chunk is not None and form.chunk % page_size]
        return f"page_size {page_size} does not divide the attention chunks of {chunks[0]} tokens" if chunks else ""
