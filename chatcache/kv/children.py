"""Which published pages follow which history: what a prompt's last, partly matching page is looked for in."""

from __future__ import annotations

from collections.abc import Iterator


class Children:
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

    def of(self, parent: bytes) -> tuple[int, ...] | dict[int, None]:
        """Return the pages after `parent`, oldest first."""
        known = self._pages.get(parent, ())
        return (known,) if isinstance(known, int) else known

    def __len__(self) -> int:
        """Count all pages."""
        return sum(1 if isinstance(known, int) else len(known) for known in self._pages.values())

    def __iter__(self) -> Iterator[tuple[bytes, list[int]]]:
        return ((parent, list(self.of(parent))) for parent in self._pages)
