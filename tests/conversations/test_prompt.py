"""Prompt assembly against the full rendering, on append-only templates and on ones that rewrite history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.prompt import MAX_LOOKBACK, Known, Message, Prompt, assemble
from chatcache.conversations.token_memo import TokenMemo
from tests.gateway.serving import CHATML, tiny_tokenizer, tokenizer_with

APPEND_ONLY = {
    "chatml": CHATML,
    "trims": CHATML.replace("m.content", "m.content | trim"),
    "words": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    ),
}
REWRITES = {
    "drops reasoning": CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
    "system moves to the last turn": (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% if loop.last %}"
        "{{ messages[0].content }} {% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "counts the turns first": "{{ messages | length }} " + CHATML,
    "numbers from the end": "{% for m in messages %}{{ loop.revindex }} {{ m.content }}<|im_end|>{% endfor %}",
}
texts = st.text(alphabet="ab \n,é你🎉<|>", max_size=12)


def chat(*texts: str, system: str | None = None) -> list[Message]:
    """Alternate user and assistant."""
    turns = [Message(role=("user", "assistant")[at % 2], content=text) for at, text in enumerate(texts)]
    return [*([Message(role="system", content=system)] if system is not None else []), *turns]


class Memory:
    """Knows replies as a store would: the prompt that was sent, then the ids that came."""

    def __init__(self) -> None:
        self.replies: dict[tuple[str, str], tuple[int, ...]] = {}

    def known(self, index: int, head: str, message: Message) -> Known | None:
        ids = self.replies.get((head, message["content"]))
        return Known(message["content"], ids) if ids is not None else None

    def say(self, prompt: Prompt, reply: str, ids: tuple[int, ...]) -> None:
        self.replies[prompt.text, reply] = (*prompt.token_ids, *ids)


@settings(deadline=None)
@given(st.sampled_from(sorted(APPEND_ONLY)), st.lists(texts, min_size=1, max_size=5), st.none() | texts)
def test_canonical_replies_give_the_full_rendering(name: str, said: list[str], system: str | None) -> None:
    """Where each reply's ids are what the tokenizer would choose, assembling is rendering."""
    tokenizer, memory = tokenizer_with(APPEND_ONLY[name]), Memory()
    if name == "trims":  # a reply's own white space stays in its ids: that is what the model saw
        said = [text.strip() for text in said]
    for turn in range(0, len(said), 2):
        messages = chat(*said[: turn + 1], system=system)
        prompt = assemble(tokenizer, messages, memory.known)
        assert prompt.text == tokenizer.render(messages)
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
        # A token may span a reply and its surroundings: in "words" anywhere, elsewhere where it begins with a line end.
        if name != "words" and not any(reply.startswith("\n") for reply in said[1:turn:2]):
            assert list(prompt.token_ids) == tokenizer.render_ids(messages)
        if turn:
            assert prompt.is_append_only and prompt.base_message == len(messages) - 2
        if turn + 1 < len(said):
            memory.say(prompt, said[turn + 1], tuple(tokenizer.encode(said[turn + 1])))


@settings(deadline=None)
@given(st.lists(st.integers(4, tiny_tokenizer().vocab_size - 1), min_size=1, max_size=20))
def test_history_is_never_tokenised_again(ids: list[int]) -> None:
    """Any ids a model may come up with stay as they are."""
    tokenizer, memory = tiny_tokenizer(), Memory()
    first = assemble(tokenizer, chat("Hi"))
    reply = tokenizer.decode(ids)
    memory.say(first, reply, tuple(ids))
    second = assemble(tokenizer, chat("Hi", reply, "And?"), memory.known)
    assert second.token_ids[: second.num_reused] == (*first.token_ids, *ids)
    assert second.is_append_only and second.base_message == 1
    suffix = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert list(second.token_ids[second.num_reused :]) == tokenizer.encode(suffix)


@pytest.mark.parametrize("name", REWRITES)
def test_templates_that_rewrite_history_fall_back_and_say_so(name: str) -> None:
    tokenizer, memory = tokenizer_with(REWRITES[name]), Memory()
    first = assemble(tokenizer, chat("Hi", system="Be brief"))
    assert first.is_append_only
    memory.say(first, "hm</think>Hello", (5, 6, 7))
    messages = chat("Hi", "hm</think>Hello", "And?", system="Be brief")
    second = assemble(tokenizer, messages, memory.known)
    assert not second.is_append_only and second.num_reused == 0 and second.base_message is None
    assert list(second.token_ids) == tokenizer.render_ids(messages)


def test_the_latest_known_reply_wins_and_unknown_ones_are_passed_over() -> None:
    tokenizer, memory = tiny_tokenizer(), Memory()
    first = assemble(tokenizer, chat("a"))
    memory.say(first, "b", (9, 9, 9))
    edited = assemble(tokenizer, chat("a", "b", "c", "never said by us", "d"), memory.known)
    assert edited.base_message == 1 and edited.token_ids[: edited.num_reused] == (*first.token_ids, 9, 9, 9)
    memory.say(assemble(tokenizer, chat("a", "b", "c"), memory.known), "never said by us", (8, 8))
    assert assemble(tokenizer, chat("a", "b", "c", "never said by us", "d"), memory.known).base_message == 3


def test_looking_back_is_bounded() -> None:
    tokenizer, asked = tiny_tokenizer(), []

    def known(index: int, head: str, message: Message) -> None:
        asked.append(index)

    said = [str(number) for number in range(101)]
    assert list(assemble(tokenizer, chat(*said), known).token_ids) == tokenizer.render_ids(chat(*said))
    assert asked == list(range(99, 99 - 2 * MAX_LOOKBACK, -2))


def test_an_opening_reply_is_just_text() -> None:
    """Nothing of ours can precede a conversation's first message."""
    messages = [Message(role="assistant", content="Welcome"), Message(role="user", content="Hi")]

    def known(index: int, head: str, message: Message) -> Known:
        raise AssertionError("asked")

    assert list(assemble(tiny_tokenizer(), messages, known).token_ids) == tiny_tokenizer().render_ids(messages)


def test_transcripts_forget_the_oldest_first() -> None:
    transcripts = TokenMemo(max_tokens=10)
    transcripts.remember("", "p", "a", [1] * 4)
    transcripts.remember("", "p", "b", [2] * 4)
    assert transcripts.recall("", "p", "a") == Known("a", (1,) * 4)
    transcripts.remember("", "p", "c", [3] * 4)
    assert transcripts.recall("", "p", "b") is None
    assert transcripts.recall("", "p", "a") == Known("a", (1,) * 4)
    transcripts.remember("", "p", "a", [4] * 9)
    assert (transcripts.recall("", "p", "a"), transcripts.recall("", "p", "c")) == (Known("a", (4,) * 9), None)
    transcripts.remember("", "p", "huge", [5] * 11)
    assert transcripts.recall("", "p", "huge") is None


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts, texts), min_size=2, max_size=2, unique=True))
def test_transcripts_keep_namespaces_heads_and_replies_apart(keys: list[tuple[str, str, str]]) -> None:
    transcripts = TokenMemo()
    one, two = keys
    transcripts.remember(*one, [1])
    trimmed: Any = [(space, head, reply.strip()) for space, head, reply in keys]
    assert transcripts.recall(*two) == (Known(two[2], (1,)) if trimmed[0] == trimmed[1] else None)
    assert transcripts.recall(one[0], one[1], f" {one[2]}\n") == Known(f" {one[2]}\n", (1,))
