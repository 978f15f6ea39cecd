r"""The page pool: reference counts, the index of published pages, and eviction.

Every page is in one of three states:

    blank --allocate--> held --last reference released--> idle   if it is published: can be matched, evicted when needed
      ^                      \--------------------------> blank  if it is not
      '--- evict: an idle page is removed from the index and handed out again

A page is *published* while the index maps its key to it: its contents are final, and any request with the same prefix
may match it. A published page is never written; a sole holder that wants to write unpublishes it first (see
`KVCache.reserve`).

Requests that compute the same tokens at the same time fill several pages with the same contents. The first one is
published; the others are *duplicates* as long as they are held. If the published page is evicted or unpublished, its
oldest duplicate is published in its place. So the pages that follow can still be reached.

Eviction order, a contract: blank pages first, then idle pages, least recently released first. A table releases its
last page first, and every table that holds a page also holds all pages before it, or duplicates of them. The release
of a duplicate counts as a release of the published page. So a chain is evicted from its end.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from chatcache.kv_cache.page_hash import TOKEN_BYTES, PageContent, PageHashChain, hash_page

NULL_PAGE = 0
MAX_SCANNED_CHILDREN = 64
MAX_EVICTED_KEYS = 65_536


class InvariantError(RuntimeError):
    """The cache is inconsistent or was misused: a bug in the calling code, never overload."""


class PagePool:
    """Reference counts and contents of all pages.

    Page 0, the null page, is never allocated.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is never used), got {num_pages}")
        self.num_pages = num_pages
        self.refs = [0] * num_pages  # number of holders: page tables and shared prefixes
        self.owners = array("q", bytes(8 * num_pages))  # owner id of each page, see `page_table.record_owner`
        self._blank = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._content: list[PageContent | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}  # by key: held, unpublished pages, oldest first
        self._children = ChildIndex()  # published pages by parent key
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys, oldest first, for `was_evicted`
        self.num_evictions = 0
        self._max_evicted = min(4 * num_pages, MAX_EVICTED_KEYS)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can hand out: blank and idle pages."""
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
        """Whether no page is published, so that nothing can be matched."""
        return not self._index

    def allocate(self, num_pages: int) -> list[int] | None:
        """Allocate pages with one reference each; None, and no change, if too few are free."""
        if num_pages > self.num_free:
            return None
        blank, refs = self._blank, self.refs
        num_left = max(len(blank) - num_pages, 0)
        pages = blank[num_left:]
        del blank[num_left:]
        while len(pages) < num_pages:
            pages.append(self._evict())
        for page in pages:
            refs[page] = 1
        return pages

    def _evict(self) -> int:
        """Unpublish and return the least recently released idle page, recording its eviction."""
        page, _ = self._idle.popitem(last=False)  # before `unpublish`, which would make an idle page blank
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
        """Add one reference to each of `pages`; an idle page becomes held again."""
        refs = self.refs
        for page in pages:
            if not refs[page]:
                try:
                    del self._idle[page]
                except KeyError:
                    raise InvariantError(f"page {page} was retained, but it has no holder and is not idle") from None
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference from each of `pages`, last page first.

        The pages are given in table order.
        """
        refs, contents = self.refs, self._content
        for page in reversed(pages):
            left = refs[page] - 1
            if not left:
                content = contents[page]
                if content is None:
                    self._blank.append(page)
                elif (published := self._index.get(content.key)) == page:
                    self._idle[page] = None
                else:
                    is_duplicate = self._remove_duplicate(page, content.key)
                    if is_duplicate and published is not None and published in self._idle:
                        self._idle.move_to_end(published)
                    contents[page] = None
                    self._blank.append(page)
            elif left < 0:
                raise InvariantError(f"page {page} was released more often than held")
            refs[page] = left

    def is_published(self, page: int) -> bool:
        content = self._content[page]
        return content is not None and self._index.get(content.key) == page

    def content(self, page: int) -> PageContent | None:
        """Return the contents of a page; None if it is blank or still being filled."""
        return self._content[page]

    def set_content(self, page: int, content: PageContent) -> None:
        """Record the final contents of a held page without publishing it."""
        self.set_contents((page,), (content,))

    def set_contents(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        refs, page_contents = self.refs, self._content
        for page, content in zip(pages, contents, strict=True):
            if not refs[page]:
                raise InvariantError(f"the contents of page {page} were set, but it has no holder")
            if (old := page_contents[page]) is not None and old.key != content.key:
                self._remove_duplicate(page, old.key)
            page_contents[page] = content

    def publish(self, page: int, content: PageContent) -> None:
        """Record the contents of a held page and add it to the index, so that it can be matched.

        Call only after the step that computed the page was executed. If a page with the same key is already published,
        that page stays in the index and this one becomes its duplicate.
        """
        self.publish_all((page,), (content,))

    def publish_all(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        self.set_contents(pages, contents)
        index, add_child = self._index.setdefault, self._children.add
        for page, content in zip(pages, contents, strict=True):
            if index(content.key, page) == page:
                add_child(content.parent, page)
            else:
                self._duplicates.setdefault(content.key, {})[page] = None

    def unpublish(self, page: int) -> None:
        """Remove a page from the index, so that it cannot be matched; its oldest duplicate takes its place.

        Its holders keep it.
        """
        content = self._content[page]
        if content is None:
            return
        if self._index.get(content.key) != page:
            self._remove_duplicate(page, content.key)
            return
        del self._index[content.key]
        self._children.remove(content.parent, page)
        if (heir := next(iter(self._duplicates.get(content.key, ())), None)) is not None:
            self._remove_duplicate(heir, content.key)
            self._index[content.key] = heir
            self._children.add(content.parent, heir)
        if page in self._idle:
            del self._idle[page]
            self._content[page] = None
            self._blank.append(page)

    def _remove_duplicate(self, page: int, key: bytes) -> bool:
        """Forget a duplicate; return whether the page was one."""
        duplicates = self._duplicates.get(key)
        if duplicates is None or page not in duplicates:
            return False
        del duplicates[page]
        if not duplicates:
            del self._duplicates[key]
        return True

    def find(self, content: PageContent) -> int | None:
        """Return the published page with exactly this content, or None."""
        page = self._index.get(content.key)
        return page if page is not None and self._content[page] == content else None

    def match_full_pages(self, chain: PageHashChain, num_pages: int, start: int = 0) -> list[int]:
        """Return the published pages of the chain from page `start` to the first missing one.

        At most up to page `num_pages - 1`.
        """
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
        """Find the published page after `parent` with the longest common prefix with `tokens`.

        Returns (page, number of common tokens), or None if no page has the same first token. `among` restricts the
        search to these pages. A parent may have thousands of children: only the newest MAX_SCANNED_CHILDREN are
        compared token by token; an older child is found only if `tokens` begins with all of its tokens.
        """
        best: tuple[int, int] | None = None
        first = tokens[:TOKEN_BYTES]
        for page in self._newest_children(parent):
            if among is not None and page not in among:
                continue
            cached = self._published_content(page).tokens
            if cached.startswith(first) and (num_common := num_common_tokens(cached, tokens)) > (
                best[1] if best else 0
            ):
                best = page, num_common
        if len(self._children.get(parent)) > MAX_SCANNED_CHILDREN:
            best = self._longest_contained_page(parent, tokens, best[1] if best else 0, among) or best
        return best

    def _longest_contained_page(
        self, parent: bytes, tokens: bytes, min_tokens: int, among: Collection[int] | None
    ) -> tuple[int, int] | None:
        """Find the longest published page whose tokens are all at the start of `tokens`.

        It must have more than `min_tokens` tokens.
        """
        for num_tokens in range(len(tokens) // TOKEN_BYTES, min_tokens, -1):
            page = self.find(hash_page(parent, tokens[: num_tokens * TOKEN_BYTES]))
            if page is not None and (among is None or page in among):
                return page, num_tokens
        return None

    def published_prefixes(self, parent: bytes, tokens: bytes, min_tokens: int) -> list[int]:
        """Return the published pages after `parent` with more than `min_tokens` tokens, a prefix of `tokens`."""
        cached = ((page, self._published_content(page).tokens) for page in self._children.get(parent))
        return [page for page, own in cached if len(own) > min_tokens * TOKEN_BYTES and tokens.startswith(own)]

    def children(self, parent: bytes) -> Iterator[PageContent]:
        """Yield the contents of the newest published pages after `parent`, newest first.

        At most MAX_SCANNED_CHILDREN of them.
        """
        return map(self._published_content, self._newest_children(parent))

    def was_evicted(self, key: bytes) -> bool:
        """Return whether a page with this key was evicted and not computed again since.

        The pool remembers the last 4 * num_pages evictions, at most MAX_EVICTED_KEYS.
        """
        return key in self._evicted and key not in self._index

    def _newest_children(self, parent: bytes) -> Iterator[int]:
        return islice(reversed(self._children.get(parent)), MAX_SCANNED_CHILDREN)

    def unpublish_all(self) -> None:
        """Remove all pages from the index.

        Idle pages become blank; held pages stay with their holders.
        """
        self._duplicates.clear()
        for page in list(self._index.values()):
            self.unpublish(page)

    def _published_content(self, page: int) -> PageContent:
        content = self._content[page]
        if content is None:
            raise InvariantError(f"page {page} is in the index without contents")
        return content

    def check_invariants(self) -> None:
        """Verify every invariant that can be checked without the page tables.

        Raises: InvariantError describing the first violation.
        """
        for violation in self._violations():
            raise InvariantError(violation)

    def _violations(self) -> Iterator[str]:
        """Yield a description of each violated invariant of page states and the index."""
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
                yield f"page {page} is blank but its contents are recorded"
            if page in idle and not self.is_published(page):
                yield f"page {page} is idle but cannot be matched"
        yield from self._index_violations()

    def idle_violations(self, first: int, num_pages: int) -> Iterator[str]:
        """Yield the violated invariants of some pages of an idle engine, where no page is held.

        Checks pages `first` to `first + num_pages - 1`.
        """
        for page in range(max(first, 1), min(first + num_pages, self.num_pages)):
            content = self._content[page]
            if self.refs[page]:
                yield f"page {page} has {self.refs[page]} holders though no request is running"
            elif (page in self._idle) != (content is not None):
                yield f"page {page} is idle={page in self._idle}, its contents recorded={content is not None}"
            elif content is not None and self._index.get(content.key) != page:
                yield f"page {page} is idle but cannot be matched"
            elif content is not None and page not in self._children.get(content.parent):
                yield f"page {page} is in the index but not among its parent's children"
        if self._duplicates:
            yield f"{len(self._duplicates)} pages are duplicates though no request is running"
        for page in self._blank[first : first + num_pages]:
            if self.refs[page] or self._content[page] is not None:
                yield f"page {page} is blank but held, or its contents are recorded"

    def _index_violations(self) -> Iterator[str]:
        for key, page in self._index.items():
            content = self._content[page]
            if content is None or content.key != key:
                yield f"the index maps a key to page {page}, whose contents have another key"
            elif page not in self._children.get(content.parent):
                yield f"page {page} is in the index but not among its parent's children"
        if len(self._children) != len(self._index):
            yield "a page is among its parent's children but not in the index"
        for key, pages in self._duplicates.items():
            for page in pages:
                content = self._content[page]
                if not self.refs[page] or content is None or content.key != key:
                    yield f"page {page} is a duplicate, but it is not held or has other contents"
                elif self._index.get(key, page) == page:
                    yield f"page {page} is a duplicate, but no other page with its contents is published"


def num_common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Count the leading tokens that two encoded token sequences have in common."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    left, right = (np.frombuffer(tokens, "<i4", size // TOKEN_BYTES) for tokens in (a, b))
    return int(np.argmax(left != right))


class ChildIndex:
    """Published pages by parent key, oldest first.

    They are the candidates for a prompt's last, partly matching page. Almost every page has at most one successor,
    which is added in the middle of a step; so a single child is stored as a plain int, and a dict is created only for
    siblings.
    """

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[bytes, int | dict[int, None]] = {}

    def add(self, parent: bytes, page: int) -> None:
        children = self._pages.setdefault(parent, page)
        if isinstance(children, dict):
            children[page] = None
        elif children != page:
            self._pages[parent] = {children: None, page: None}

    def remove(self, parent: bytes, page: int) -> None:
        """Remove a page from its parent's children.

        Raises: KeyError if the page is not among them.
        """
        children = self._pages[parent]
        if isinstance(children, dict):
            del children[page]
            if children:
                return
        elif children != page:
            raise KeyError(page)
        del self._pages[parent]

    def get(self, parent: bytes) -> tuple[int, ...] | dict[int, None]:
        """Return the published pages after `parent`, oldest first."""
        children = self._pages.get(parent, ())
        return (children,) if isinstance(children, int) else children

    def __len__(self) -> int:
        """Return the number of pages of all parents."""
        return sum(1 if isinstance(children, int) else len(children) for children in self._pages.values())

    def __iter__(self) -> Iterator[tuple[bytes, list[int]]]:
        return ((parent, list(self.get(parent))) for parent in self._pages)
