"""Where messages end in tokens, against rendering and tokenising every beginning of the chat."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations import offsets as spans
from chatcache.conversations.prompt import assemble
from tests.conversations.test_prompt import APPEND_ONLY, REWRITES, Memory, chat, texts
from tests.gateway.serving import CHATML, tiny_tokenizer, tokenizer_with


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["chatml", "trims"]), st.lists(texts, min_size=1, max_size=5), st.none() | texts)
def test_ends_are_those_of_every_beginning(name: str, said: list[str], system: str | None) -> None:
    tokenizer, messages = tokenizer_with(APPEND_ONLY[name]), chat(*said, system=system)
    ends = spans.message_token_offsets(tokenizer, messages, assemble(tokenizer, messages))
    # Turns begin with a control token, so every beginning is tokenised as in the whole.
    assert ends == tuple(
        len(tokenizer.render_ids(messages[: count + 1], add_generation_prompt=False)) for count in range(len(messages))
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(texts, min_size=1, max_size=5))
def test_a_token_across_two_messages_belongs_to_the_later(said: list[str]) -> None:
    tokenizer, messages = tokenizer_with(APPEND_ONLY["words"]), chat(*said)
    prompt = assemble(tokenizer, messages)
    ends = spans.message_token_offsets(tokenizer, messages, prompt)
    assert ends is not None and list(ends) == sorted(ends)
    for count, end in enumerate(ends):
        head = tokenizer.render(messages[: count + 1], add_generation_prompt=False)
        assert head.startswith(tokenizer.decode(prompt.token_ids[:end], skip_special_tokens=False).rstrip("\ufffd"))


def test_a_reused_reply_keeps_its_own_tokens() -> None:
    tokenizer, memory = tokenizer_with(APPEND_ONLY["trims"]), Memory()
    first = assemble(tokenizer, chat("Hi"))
    ids = tuple(tokenizer.encode("  Hello  "))  # its white space is in the pages, not in the template's rendering
    memory.replies[first.text, "Hello"] = (*first.token_ids, *ids)
    messages = chat("Hi", "Hello", "And?")
    prompt = assemble(tokenizer, messages, memory.known)
    ends = spans.message_token_offsets(tokenizer, messages, prompt)
    assert prompt.base_message == 1 and ends is not None
    tail = [len(tokenizer.encode(text)) for text in ("<|im_end|>\n", "<|im_start|>user\nAnd?<|im_end|>\n")]
    assert ends[1:] == (prompt.num_reused + tail[0], prompt.num_reused + sum(tail))


def test_nothing_is_said_of_rewritten_history_or_of_what_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, messages = tokenizer_with(REWRITES["counts the turns first"]), chat("a", "b", "c")
    assert spans.message_token_offsets(tokenizer, messages, assemble(tokenizer, messages)) is None
    tokenizer = tokenizer_with(CHATML)
    assert spans.message_token_offsets(tokenizer, messages, assemble(tokenizer, messages)) is not None
    monkeypatch.setattr(spans, "MAX_RENDERED_CHARS", 10)
    assert spans.message_token_offsets(tokenizer, messages, assemble(tiny_tokenizer(), messages)) is None
