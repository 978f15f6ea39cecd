"""The memo of generated replies for clients that resend the whole history as text."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.prompt import Known
from chatcache.conversations.token_memo import TokenMemo

texts = st.text(alphabet="ab \n,é你🎉<|>", max_size=12)


def test_memo_over_its_token_limit_drops_the_oldest_replies() -> None:
    memo = TokenMemo(max_tokens=10)
    memo.remember("", "p", "a", [1] * 4)
    memo.remember("", "p", "b", [2] * 4)
    assert memo.recall("", "p", "a") == Known("a", (1,) * 4)
    memo.remember("", "p", "c", [3] * 4)
    assert memo.recall("", "p", "b") is None
    assert memo.recall("", "p", "a") == Known("a", (1,) * 4)
    memo.remember("", "p", "a", [4] * 9)
    assert (memo.recall("", "p", "a"), memo.recall("", "p", "c")) == (Known("a", (4,) * 9), None)
    memo.remember("", "p", "huge", [5] * 11)
    assert memo.recall("", "p", "huge") is None


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts, texts), min_size=2, max_size=2, unique=True))
def test_memo_recalls_only_the_same_namespace_head_and_reply(keys: list[tuple[str, str, str]]) -> None:
    memo = TokenMemo()
    one, two = keys
    memo.remember(*one, [1])
    trimmed: Any = [(space, head, reply.strip()) for space, head, reply in keys]
    assert memo.recall(*two) == (Known(two[2], (1,)) if trimmed[0] == trimmed[1] else None)
    assert memo.recall(one[0], one[1], f" {one[2]}\n") == Known(f" {one[2]}\n", (1,))
