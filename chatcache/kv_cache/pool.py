r"""All pages: who holds them, what they contain, and which goes next when room is needed.

    blank ---allocate---> held ---release (last hold)---> idle, if published    (still matchable, evicted when needed)
      ^                                            \----> blank, otherwise
      +---- evicted: an idle page loses its name and is handed out

A page is *published* while the index names it: its contents are final and anybody may match it. Published pages are
never written; a sole holder who wants to write withdraws the page first (see `KVCache.reserve`).

Eviction order, a contract: blank pages first; then idle ones, least recently released first. A table releases its
tail before its head, and whoever holds a page also holds everything before it, so a chain is evicted from its tail.

Which published pages follow which history: what a prompt's last, partly matching page is looked for in.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from chatcache.kv_cache.page_hash import TOKEN_BYTES, PageContent, PageHashChain, hash_page


class ChildIndex:
    """Published pages by their parent key, oldest first.

    Almost every page has one successor at most, and is given it in the middle of a step: so an only child is noted as
    a plain int, and only siblings cost a dict.
    """

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[bytes, int | dict[int, None]] = {}

    def add(self, parent: bytes, page: int) -> None:
        known = self._pages.setdefault(parent, page)
        if isinstance(known, dict):
            known[page] = None
        elif known != page:
            self._pages[parent] = {known: None, page: None}

    def remove(self, parent: bytes, page: int) -> None:
        """Raises: KeyError if the page is not among the children."""
        known = self._pages[parent]
        if isinstance(known, dict):
            del known[page]
            if known:
                return
        elif known != page:
            raise KeyError(page)
        del self._pages[parent]

    def get(self, parent: bytes) -> tuple[int, ...] | dict[int, None]:
        """Return the pages after `parent`, oldest first."""
        known = self._pages.get(parent, ())
        return (known,) if isinstance(known, int) else known

    def __len__(self) -> int:
        """Count all pages."""
        return sum(1 if isinstance(known, int) else len(known) for known in self._pages.values())

    def __iter__(self) -> Iterator[tuple[bytes, list[int]]]:
        return ((parent, list(self.get(parent))) for parent in self._pages)


NULL_PAGE = 0
MAX_SCANNED_CHILDREN = 64
MAX_EVICTED_KEYS = 65_536


class InvariantError(RuntimeError):
    """The pool contradicts itself or was misused: a bug of the caller, never a matter of load."""


class PagePool:
    """`num_pages` pages, page 0 being the null page that nobody is ever given."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is never used), got {num_pages}")
        self.num_pages = num_pages
        self.refs = [0] * num_pages  # holders: page tables, and segments that several tables share
        self.owners = array("q", bytes(8 * num_pages))  # see `owners`; what the tables' operations note
        self._blank = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._content: list[PageContent | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._children = ChildIndex()  # the published pages by what they follow
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # names, oldest first, for `was_evicted`
        self.num_evictions = 0
        self._max_evicted = min(4 * num_pages, MAX_EVICTED_KEYS)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_in_use(self) -> int:
        return self.num_usable - self.num_free

    def idle_pages(self) -> NDArray[np.int64]:
        """List the idle pages, least recently released first."""
        return np.fromiter(self._idle, np.int64, len(self._idle))

    @property
    def is_index_empty(self) -> bool:
        """Say whether nothing can be found here."""
        return not self._index

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hand out `num_pages` pages, each held once, or none at all."""
        if num_pages > self.num_free:
            return None
        blank, refs = self._blank, self.refs
        kept = max(len(blank) - num_pages, 0)
        pages = blank[kept:]
        del blank[kept:]
        while len(pages) < num_pages:
            pages.append(self._evict())
        for page in pages:
            refs[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)  # out of the idle first, so that withdrawing does not blank it
        key = self._published_content(page).key
        self.num_evictions += 1
        self._evicted[key] = None
        self._evicted.move_to_end(key)
        if len(self._evicted) > self._max_evicted:
            self._evicted.popitem(last=False)
        self.unpublish(page)
        self._content[page] = None
        return page

    def retain(self, pages: Iterable[int]) -> None:
        """Hold `pages` once more; idle ones come back to life."""
        refs = self.refs
        for page in pages:
            if not refs[page]:
                try:
                    del self._idle[page]
                except KeyError:
                    raise InvariantError(f"page {page} was retained but nobody holds it and it is not idle") from None
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of `pages`, given in table order; the tail is let go first."""
        refs, contents = self.refs, self._content
        for page in reversed(pages):
            left = refs[page] - 1
            if not left:
                content = contents[page]
                if content is None:
                    self._blank.append(page)
                elif self._index.get(content.key) == page:
                    self._idle[page] = None
                else:
                    contents[page] = None
                    self._blank.append(page)
            elif left < 0:
                raise InvariantError(f"page {page} was released more often than held")
            refs[page] = left

    def is_published(self, page: int) -> bool:
        content = self._content[page]
        return content is not None and self._index.get(content.key) == page

    def content(self, page: int) -> PageContent | None:
        """Return what is known of the page's contents; None while it is being filled."""
        return self._content[page]

    def set_content(self, page: int, content: PageContent) -> None:
        """Note the final contents of a held page without letting anybody match it."""
        self.set_contents((page,), (content,))

    def set_contents(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        refs, known = self.refs, self._content
        for page, content in zip(pages, contents, strict=True):
            if not refs[page]:
                raise InvariantError(f"page {page} was described but nobody holds it")
            known[page] = content

    def publish(self, page: int, content: PageContent) -> None:
        """Note the contents of a held page and let it be matched, after execution only. The first of equals wins."""
        self.publish_all((page,), (content,))

    def publish_all(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        self.set_contents(pages, contents)
        index, add_child = self._index.setdefault, self._children.add
        for page, content in zip(pages, contents, strict=True):
            if index(content.key, page) == page:
                add_child(content.parent, page)

    def unpublish(self, page: int) -> None:
        """Take the page out of the index, if it is in: nobody will match it any more. Its holders keep it."""
        content = self._content[page]
        if content is None or self._index.get(content.key) != page:
            return
        del self._index[content.key]
        self._children.remove(content.parent, page)
        if page in self._idle:
            del self._idle[page]
            self._content[page] = None
            self._blank.append(page)

    def find(self, content: PageContent) -> int | None:
        """Find the published page with this content."""
        page = self._index.get(content.key)
        return page if page is not None and self._content[page] == content else None

    def match_full_pages(self, chain: PageHashChain, num_pages: int, start: int = 0) -> list[int]:
        """Find the longest run of published pages among the chain's pages start .. num_pages - 1, in order."""
        found: list[int] = []
        for index, key in enumerate(chain.keys[start:num_pages], start):
            page = self._index.get(key)
            if page is None:
                break
            content = self._published_content(page)
            if content.tokens != chain.page_tokens(index) or content.parent != chain.parents[index]:
                break
            found.append(page)
        return found

    def match_partial_page(
        self, parent: bytes, tokens: bytes, among: Collection[int] | None = None
    ) -> tuple[int, int] | None:
        """Find the published page after `parent` that begins with most of `tokens`: (page, number of tokens).

        Of a popular parent's thousands of continuations only the newest MAX_SCANNED_CHILDREN are compared; the others
        are found if `tokens` begins with all they have.
        """
        best: tuple[int, int] | None = None
        first = tokens[:TOKEN_BYTES]
        for page in self._newest_children(parent):
            if among is not None and page not in among:
                continue
            known = self._published_content(page).tokens
            if known.startswith(first) and (num_common := num_common_tokens(known, tokens)) > (best[1] if best else 0):
                best = page, num_common
        if len(self._children.get(parent)) > MAX_SCANNED_CHILDREN:
            best = self._longest_contained_page(parent, tokens, best[1] if best else 0, among) or best
        return best

    def _longest_contained_page(
        self, parent: bytes, tokens: bytes, num_known: int, among: Collection[int] | None
    ) -> tuple[int, int] | None:
        for num_tokens in range(len(tokens) // TOKEN_BYTES, num_known, -1):
            page = self.find(hash_page(parent, tokens[: num_tokens * TOKEN_BYTES]))
            if page is not None and (among is None or page in among):
                return page, num_tokens
        return None

    def published_prefixes(self, parent: bytes, tokens: bytes) -> list[int]:
        """List the published pages after `parent` whose tokens `tokens` begins with."""
        children = self._children.get(parent)
        return [page for page in children if tokens.startswith(self._published_content(page).tokens)]

    def children(self, parent: bytes) -> Iterator[PageContent]:
        """Yield the newest MAX_SCANNED_CHILDREN published continuations of `parent`, newest first."""
        return map(self._published_content, self._newest_children(parent))

    def was_evicted(self, key: bytes) -> bool:
        """Say whether a page of this name had to make room lately, as far as memory goes: the last 4 x num_pages
        evictions, at most MAX_EVICTED_KEYS."""
        return key in self._evicted and key not in self._index

    def _newest_children(self, parent: bytes) -> Iterator[int]:
        return islice(reversed(self._children.get(parent)), MAX_SCANNED_CHILDREN)

    def unpublish_all(self) -> None:
        """Empty the index: idle pages become blank, held ones stay with their holders."""
        for page in list(self._index.values()):
            self.unpublish(page)

    def _published_content(self, page: int) -> PageContent:
        content = self._content[page]
        if content is None:
            raise InvariantError(f"page {page} is in the index without contents")
        return content

    def check_invariants(self) -> None:
        """Verify every invariant that the pool alone can see.

        Raises: InvariantError naming the first that does not hold.
        """
        for claim in self._violations():
            raise InvariantError(claim)

    def _violations(self) -> Iterator[str]:
        blank, idle = set(self._blank), set(self._idle)
        if len(blank) != len(self._blank):
            yield "a page is blank twice"
        if blank & idle:
            yield f"pages {sorted(blank & idle)} are both blank and idle"
        if NULL_PAGE in blank or NULL_PAGE in idle or self.refs[NULL_PAGE]:
            yield "the null page is in circulation"
        for page in range(1, self.num_pages):
            if self.refs[page] < 0:
                yield f"page {page} has {self.refs[page]} holders"
            if (self.refs[page] == 0) != (page in blank or page in idle):
                yield f"page {page} has {self.refs[page]} holders, blank={page in blank}, idle={page in idle}"
            if page in blank and self._content[page] is not None:
                yield f"page {page} is blank but its contents are noted"
            if page in idle and not self.is_published(page):
                yield f"page {page} is idle but cannot be matched"
        yield from self._index_violations()

    def idle_violations(self, first: int, num_pages: int) -> Iterator[str]:
        """Yield what is wrong with pages first .. first + num_pages - 1, given that nobody should hold any."""
        for page in range(max(first, 1), min(first + num_pages, self.num_pages)):
            content = self._content[page]
            if self.refs[page]:
                yield f"page {page} has {self.refs[page]} holders though nobody runs"
            elif (page in self._idle) != (content is not None):
                yield f"page {page} is idle={page in self._idle}, its contents noted={content is not None}"
            elif content is not None and self._index.get(content.key) != page:
                yield f"page {page} is idle but cannot be matched"
            elif content is not None and page not in self._children.get(content.parent):
                yield f"page {page} is in the index but not among its parent's children"
        for page in self._blank[first : first + num_pages]:
            if self.refs[page] or self._content[page] is not None:
                yield f"page {page} is blank but held, or its contents are noted"

    def _index_violations(self) -> Iterator[str]:
        for key, page in self._index.items():
            content = self._content[page]
            if content is None or content.key != key:
                yield f"the index names page {page}, which holds something else"
            elif page not in self._children.get(content.parent):
                yield f"page {page} is in the index but not among its parent's children"
        if len(self._children) != len(self._index):
            yield "a page is among its parent's children but not in the index"


def num_common_tokens(a: bytes, b: bytes) -> int:
    """Count the leading tokens that two pages have in common."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    return next(i for i in range(size) if a[i] != b[i]) // TOKEN_BYTES
