"""Page keys: a hash chain over a page's tokens and everything before them.

Two pages have the same key only if they hold the same tokens, after the same history, for the same tenant. So a key is
all that is needed to find a page that was computed before.

    root --page 0--> key 0 --page 1--> key 1 --namespace--> key 1' --page 2--> key 2 --page 3--> key 3
         '----- public pages, all tenants ----'            '---------- private pages, one tenant ------'

The chain starts at the root key of the model and runs through the public pages (a system prompt that the operator
declared as shared), whose keys are the same for all tenants. At the end of the public pages, or at once if there are
none, the tenant's namespace is hashed into the chain: all later keys belong to that tenant, whatever the tokens are.
A request may add a salt, which is hashed in after the namespace: it divides the pages of a tenant further, and no salt
leads to the pages of another tenant.

Keys are BLAKE2b-256 and stable across processes and machines. Tokens are hashed as little-endian int32. They are also
stored next to the key and compared on every hit, so that not even a hash collision can return the wrong page.
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

# Hashers without input: copying one is twice as fast as creating one. `person` separates the kinds of hashes.
_MODEL = blake2b(digest_size=KEY_BYTES, person=b"chatcache model")
_TENANT = blake2b(digest_size=KEY_BYTES, person=b"chatcache tenant")
_SALT = blake2b(digest_size=KEY_BYTES, person=b"chatcache salt")
_PAGE = blake2b(digest_size=KEY_BYTES, person=b"chatcache page")


class PageContent(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one page, its own key, and the key of the page before it (`parent`).

    Tokens are little-endian int32. The partly filled last page of a finished branch has fewer than `page_size` tokens,
    and a key as well.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def root_hash(model_digest: str, page_size: int) -> bytes:
    """Return the key of the empty history for one model and page size.

    The length of each part is hashed too, so that ("ab", "c") and ("a", "bc") give different keys.
    """
    hasher = _MODEL.copy()
    for part in (model_digest.encode(), str(page_size).encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def namespace_hash(key: bytes, namespace: str, salt: str = "") -> bytes:
    """Return the key that the first private page of a namespace, or of a salt within it, follows.

    `key` is the key of the last public page.
    """
    hasher = _TENANT.copy()
    hasher.update(key + namespace.encode("utf-8", "surrogatepass"))
    if not salt:
        return hasher.digest()
    salted = _SALT.copy()
    salted.update(hasher.digest() + salt.encode("utf-8", "surrogatepass"))
    return salted.digest()


def hash_page(parent: bytes, tokens: bytes) -> PageContent:
    """Hash the page that holds `tokens` after the page with key `parent`.

    Keys are always KEY_BYTES long, so the input is unambiguous.
    """
    hasher = _PAGE.copy()
    hasher.update(parent + tokens)
    return PageContent(hasher.digest(), parent, tokens)


def hash_next_pages(parents: Sequence[bytes], tokens: bytes, page_bytes: int) -> list[PageContent]:
    """Hash one full page after each of several parents.

    `tokens` holds the tokens of all these pages, one page after another.
    """
    contents: list[PageContent] = []
    new_hasher, start = _PAGE.copy, 0
    for parent in parents:
        stop = start + page_bytes
        page = tokens[start:stop]
        hasher = new_hasher()
        hasher.update(parent + page)
        contents.append(PageContent(hasher.digest(), parent, page))
        start = stop
    return contents


def hash_page_run(parent: bytes, pages: Sequence[bytes]) -> list[bytes]:
    """Return the keys of consecutive pages, the first of which follows `parent`.

    Equal to repeated calls of `hash_page`, and faster.
    """
    keys: list[bytes] = []
    new_hasher = _PAGE.copy
    for page in pages:
        hasher = new_hasher()
        hasher.update(parent)
        hasher.update(page)
        parent = hasher.digest()
        keys.append(parent)
    return keys


def encode_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Encode token ids as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Which requests may reuse a prompt's pages.

    All tenants may reuse the public pages, and requests of `namespace` with the same `salt` the others. A page is
    public if all of its tokens are among the first `num_public_tokens`; a page on the border is private.
    """

    namespace: str = ""
    num_public_tokens: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True)
class PageHashChain:
    """The keys of a prompt's full pages.

    They are computed once, and looked up each time the scheduler considers the prompt. `keys[i]` is the key of full
    page i and `parents[i]` the key that this page follows; the last parent, for which there is no key, is what the next
    page will follow. `data` holds all tokens (little-endian int32), including those after the last full page.
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
        """Return how many leading pages are public; a short prompt may have fewer pages than that."""
        return self.scope.num_public_tokens * TOKEN_BYTES // self.page_bytes

    def page_tokens(self, index: int) -> bytes:
        """Return the tokens of page `index`; the last page may be partly filled."""
        return self.data[index * self.page_bytes : (index + 1) * self.page_bytes]


def hash_pages(root: bytes, data: bytes, page_bytes: int, scope: CacheScope) -> PageHashChain:
    """Hash all full pages of `data`: the public ones, then the private ones. O(tokens)."""
    num_public = scope.num_public_tokens * TOKEN_BYTES // page_bytes
    pages = [data[start : start + page_bytes] for start in range(0, len(data) - page_bytes + 1, page_bytes)]
    public = hash_page_run(root, pages[:num_public])
    parents = [root, *public]
    if len(public) < num_public:
        return PageHashChain(data, page_bytes, scope, public, parents)
    parents[-1] = namespace_hash(parents[-1], scope.namespace, scope.salt)
    private = hash_page_run(parents[-1], pages[num_public:])
    return PageHashChain(data, page_bytes, scope, public + private, parents + private)
