"""Blocks of a message that contain files.

    File: notes.txt
    ```
    (the text)
    ```

The same file always has the same block, so that its tokens are found in the cache wherever the block follows the same
text. The fence is longer than every run of backticks in the text.
"""

from __future__ import annotations

import re

_BACKTICKS = re.compile(r"`{3,}")
_HEAD = re.compile(r"\s*File: ([^\n]+)\n(`{3,})\n")


def file_block(name: str, text: str) -> str:
    """Return the block of a file; it ends with a line break. `name` is one line."""
    fence = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(text)), default=0))
    return f"File: {name}\n{fence}\n{text}\n{fence}\n"


def split_files(content: str) -> tuple[list[str], str]:
    """Split a message into the names of the files at its start, and the text after them."""
    names: list[str] = []
    start = 0
    while head := _HEAD.match(content, start):
        name, fence = head.groups()
        end = content.find(f"\n{fence}\n", head.end() - 1)
        if end < 0:
            break
        names.append(name)
        start = end + len(fence) + 2
    return names, content[start:]
