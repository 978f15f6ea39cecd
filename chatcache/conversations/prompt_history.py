"""Prompts of recent requests, to explain how the prompt of a later request differs.

`PromptHistory` is bounded in tokens; the least recently used prompts are forgotten.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from chatcache.conversations.prompt import Function, Message

MAX_TOKENS = 2_000_000

# other: neither tools nor messages changed, but the chat template renders them differently.
Change = Literal["system", "tools", "messages", "compacted", "other"]


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """What a prompt was assembled from, and its tokens.

    `is_compacted`: its messages begin with a summary that replaces earlier ones.
    """

    messages: tuple[Message, ...]
    functions: tuple[Function, ...]
    token_ids: array[int]
    is_compacted: bool = False

    @property
    def system(self) -> tuple[Message, ...]:
        """The system messages at the beginning."""
        return tuple(takewhile(lambda message: message["role"] == "system", self.messages))


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a prompt differs from an earlier one.

    `change`: None if it begins with all of it. `num_reusable` tokens at the beginning are the same; `num_missed` of the
    earlier prompt's are not.
    """

    change: Change | None
    num_reusable: int
    num_missed: int


def compare(earlier: PromptRecord, later: PromptRecord, page_size: int) -> Comparison:
    """Compare two prompts.

    The end of the earlier prompt, within a page, may be rendered differently when a reply follows it.
    """
    same = num_equal(earlier.token_ids, later.token_ids)
    num_missed = len(earlier.token_ids) - same
    if num_missed == 0:
        return Comparison(None, same, 0)
    rest = earlier.messages[len(earlier.system) :]
    if earlier.system != later.system:
        change: Change = "system"
    elif earlier.functions != later.functions:
        change = "tools"
    elif rest == later.messages[len(later.system) :][: len(rest)]:
        if num_missed < page_size:
            return Comparison(None, same, 0)
        change = "other"
    else:
        change = "compacted" if later.is_compacted and not earlier.is_compacted else "messages"
    return Comparison(change, same, num_missed)


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix, by bisection over slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PromptHistory:
    """The prompts of recent requests by owner and id. Belongs to one event loop."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._records: OrderedDict[tuple[str, str], PromptRecord] = OrderedDict()

    def add(self, owner: str, request_id: str, record: PromptRecord) -> None:
        """Keep the prompt of a request."""
        self._records[owner, request_id] = record
        self._num_tokens += len(record.token_ids)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._records.popitem(last=False)[1].token_ids)

    def find(self, owner: str, request_id: str) -> PromptRecord | None:
        """Return the prompt of a request of this owner; None if it is not known, or no longer."""
        record = self._records.get((owner, request_id))
        if record is not None:
            self._records.move_to_end((owner, request_id))
        return record
