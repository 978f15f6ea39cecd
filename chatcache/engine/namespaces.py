"""The namespaces of the latest requests: where an operator's question is asked as well."""

from __future__ import annotations

from collections.abc import Iterator

MAX_REMEMBERED_NAMESPACES = 1024


class Namespaces:
    """The latest MAX_REMEMBERED_NAMESPACES, oldest first."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def remember(self, namespace: str) -> None:
        self._names.pop(namespace, None)
        self._names[namespace] = None
        if len(self._names) > MAX_REMEMBERED_NAMESPACES:
            del self._names[next(iter(self._names))]
