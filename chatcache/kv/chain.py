"""The names of a prompt's pages, worked out once and looked up as often as the prompt has to wait."""

from __future__ import annotations

from dataclasses import dataclass

from chatcache.kv.keys import TOKEN_BYTES, page_keys, private_key


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may find these tokens again: the first `num_public_tokens` everybody, the rest `namespace` alone.

    A page is public if it lies wholly within the public tokens; the one on their border is private.
    """

    namespace: str = ""
    num_public_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens cut into pages. `keys[i]` names full page i, which follows `parents[i]`; there is one parent more than
    full pages, for whatever comes after them.

    `data` holds all tokens (little-endian int32), those after the last full page included.
    """

    data: bytes
    page_bytes: int
    scope: Scope
    keys: list[bytes]
    parents: list[bytes]

    @property
    def num_tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @property
    def num_public_pages(self) -> int:
        """Count the pages that may be public; a short prompt has fewer."""
        return self.scope.num_public_tokens * TOKEN_BYTES // self.page_bytes

    def page(self, index: int) -> bytes:
        """Return the tokens of page `index`, perhaps fewer than a pageful."""
        return self.data[index * self.page_bytes : (index + 1) * self.page_bytes]


def name_pages(root: bytes, data: bytes, page_bytes: int, scope: Scope) -> Chain:
    """Name the full pages of `data` (little-endian int32). O(tokens)."""
    num_public = scope.num_public_tokens * TOKEN_BYTES // page_bytes
    pages = [data[start : start + page_bytes] for start in range(0, len(data) - page_bytes + 1, page_bytes)]
    public = page_keys(root, pages[:num_public])
    parents = [root, *public]
    if len(public) < num_public:
        return Chain(data, page_bytes, scope, public, parents)
    parents[-1] = private_key(parents[-1], scope.namespace)
    private = page_keys(parents[-1], pages[num_public:])
    return Chain(data, page_bytes, scope, public + private, parents + private)
