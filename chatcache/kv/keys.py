"""A page's name: a SHA-256 chain, so that equal keys mean equal tokens *and* equal history.

    root(digest, page size, namespace) --tokens 0..15--> key 0 --tokens 16..31--> key 1 --> ...

Stable across processes and machines. Tokens are hashed as little-endian int32, never as text or Python objects; the
tokens are kept beside the key and compared on a hit, so even a collision cannot hand out the wrong page.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4


class PageContent(NamedTuple):
    """What a page holds: `tokens` (little-endian int32) after everything that `parent` names.

    Fewer than `page_size` tokens for the tail of a finished branch, which has a key of its own.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def root_key(model_digest: str, page_size: int, namespace: str) -> bytes:
    """Name the empty history of one model and one namespace. Lengths are hashed too: no two inputs run together."""
    parts = (b"chatcache page v1", model_digest.encode(), str(page_size).encode(), namespace.encode("utf-8", "replace"))
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_content(parent: bytes, tokens: bytes) -> PageContent:
    """Name the page that holds `tokens` after `parent`. Parents are 32 bytes, so the split is unambiguous."""
    return PageContent(sha256(parent + tokens).digest(), parent, tokens)


def token_bytes(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return token ids as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()
