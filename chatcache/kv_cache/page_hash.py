"""A page's name: a hash chain, so that equal keys mean equal tokens, equal history *and* the same right to see them.

    root --public page 0--> key 0 --public page 1--> key 1 --namespace--> entry --page 2--> key 2 --page 3--> ...

The chain starts at the model's root and runs through the public pages (an operator's system prompt), the same for
everybody. Where they end, at once if there are none, the tenant's namespace is mixed in: from there on every name is
that tenant's own, whatever the tokens.

Keys are BLAKE2b-256, stable across processes and machines. Tokens are hashed as little-endian int32, never as text or
Python objects; they are kept beside the key and compared on a hit, so even a collision cannot hand out the wrong page.

The names of a prompt's pages, worked out once and looked up as often as the prompt has to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4
KEY_BYTES = 32

# Hashers that have read nothing yet: copying one is twice as fast as making one. `person` keeps their outputs apart.
_MODEL = blake2b(digest_size=KEY_BYTES, person=b"chatcache model")
_TENANT = blake2b(digest_size=KEY_BYTES, person=b"chatcache tenant")
_PAGE = blake2b(digest_size=KEY_BYTES, person=b"chatcache page")


class PageContent(msgspec.Struct, frozen=True, gc=False):
    """What a page holds: `tokens` (little-endian int32) after everything that `parent` names.

    Fewer than `page_size` tokens for the tail of a finished branch, which has a key of its own.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def root_hash(model_digest: str, page_size: int) -> bytes:
    """Name the empty history of one model. Lengths are hashed too: no two inputs run together."""
    hasher = _MODEL.copy()
    for part in (model_digest.encode(), str(page_size).encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def namespace_hash(key: bytes, namespace: str) -> bytes:
    """Name what `key` names, as seen from within a namespace: nobody else's names follow from it."""
    hasher = _TENANT.copy()
    hasher.update(key + namespace.encode("utf-8", "surrogatepass"))
    return hasher.digest()


def hash_page(parent: bytes, tokens: bytes) -> PageContent:
    """Name the page that holds `tokens` after `parent`. Parents are KEY_BYTES long, so the split is unambiguous."""
    hasher = _PAGE.copy()
    hasher.update(parent + tokens)
    return PageContent(hasher.digest(), parent, tokens)


def hash_next_pages(parents: Sequence[bytes], tokens: bytes, page_bytes: int) -> list[PageContent]:
    """Name one page after each parent; `tokens` are the pages' own, one after another."""
    blank, contents, start = _PAGE.copy, list[PageContent](), 0
    for parent in parents:
        stop = start + page_bytes
        page = tokens[start:stop]
        hasher = blank()
        hasher.update(parent + page)
        contents.append(PageContent(hasher.digest(), parent, page))
        start = stop
    return contents


def hash_page_run(parent: bytes, pages: Sequence[bytes]) -> list[bytes]:
    """Name a run of pages of which the first follows `parent`: the keys that `hash_page` gives them one by one."""
    blank, keys = _PAGE.copy, list[bytes]()
    for page in pages:
        hasher = blank()
        hasher.update(parent)
        hasher.update(page)
        parent = hasher.digest()
        keys.append(parent)
    return keys


def encode_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return token ids as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who may find these tokens again: the first `num_public_tokens` everybody, the rest `namespace` alone.

    A page is public if it lies wholly within the public tokens; the one on their border is private.
    """

    namespace: str = ""
    num_public_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PageHashChain:
    """Tokens cut into pages. `keys[i]` names full page i, which follows `parents[i]`; there is one parent more than
    full pages, for whatever comes after them.

    `data` holds all tokens (little-endian int32), those after the last full page included.
    """

    data: bytes
    page_bytes: int
    scope: CacheScope
    keys: list[bytes]
    parents: list[bytes]

    @property
    def num_tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @property
    def num_public_pages(self) -> int:
        """Count the pages that may be public; a short prompt has fewer."""
        return self.scope.num_public_tokens * TOKEN_BYTES // self.page_bytes

    def page_tokens(self, index: int) -> bytes:
        """Return the tokens of page `index`, perhaps fewer than a pageful."""
        return self.data[index * self.page_bytes : (index + 1) * self.page_bytes]


def hash_pages(root: bytes, data: bytes, page_bytes: int, scope: CacheScope) -> PageHashChain:
    """Name the full pages of `data` (little-endian int32). O(tokens)."""
    num_public = scope.num_public_tokens * TOKEN_BYTES // page_bytes
    pages = [data[start : start + page_bytes] for start in range(0, len(data) - page_bytes + 1, page_bytes)]
    public = hash_page_run(root, pages[:num_public])
    parents = [root, *public]
    if len(public) < num_public:
        return PageHashChain(data, page_bytes, scope, public, parents)
    parents[-1] = namespace_hash(parents[-1], scope.namespace)
    private = hash_page_run(parents[-1], pages[num_public:])
    return PageHashChain(data, page_bytes, scope, public + private, parents + private)
