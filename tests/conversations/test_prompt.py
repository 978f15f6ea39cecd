"""Prompt assembly against the full rendering, and the tokens of shared system prompts.

Templates are append-only ones and ones that rewrite history.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.prompt import MAX_LOOKBACK, Known, Message, Prompt, SharedSystemPrompts, assemble
from chatcache.tokenizer.tokenizer import Tokenizer
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
    """Return messages that alternate between user and assistant."""
    turns = [Message(role=("user", "assistant")[at % 2], content=text) for at, text in enumerate(texts)]
    return [*([Message(role="system", content=system)] if system is not None else []), *turns]


class Memory:
    """Recalls replies as a store would: the ids of the prompt and of the reply."""

    def __init__(self) -> None:
        self.replies: dict[tuple[str, str], tuple[int, ...]] = {}

    def known(self, index: int, head: str, message: Message) -> Known | None:
        ids = self.replies.get((head, message["content"]))
        return Known(message["content"], ids) if ids is not None else None

    def say(self, prompt: Prompt, reply: str, ids: tuple[int, ...]) -> None:
        self.replies[prompt.text, reply] = (*prompt.token_ids, *ids)


@settings(deadline=None)
@given(st.sampled_from(sorted(APPEND_ONLY)), st.lists(texts, min_size=1, max_size=5), st.none() | texts)
@pytest.mark.slow
def test_assemble_canonical_replies_equals_the_tokenised_rendering(
    name: str, texts: list[str], system: str | None
) -> None:
    """Where each reply's ids are the tokenizer's choice, assembling equals rendering and tokenising."""
    tokenizer, memory = tokenizer_with(APPEND_ONLY[name]), Memory()
    if name == "trims":  # a reply's own white space stays in its ids: that is what the model saw
        texts = [text.strip() for text in texts]
    for turn in range(0, len(texts), 2):
        messages = chat(*texts[: turn + 1], system=system)
        prompt = assemble(tokenizer, messages, memory.known)
        assert prompt.text == tokenizer.render(messages)
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
        # A token may span a reply and its surroundings: in "words" anywhere, elsewhere where it begins with a line end.
        if name != "words" and not any(reply.startswith("\n") for reply in texts[1:turn:2]):
            assert list(prompt.token_ids) == tokenizer.render_ids(messages)
        if turn:
            assert prompt.is_append_only and prompt.base_message == len(messages) - 2
        if turn + 1 < len(texts):
            memory.say(prompt, texts[turn + 1], tuple(tokenizer.encode(texts[turn + 1])))


@settings(deadline=None)
@given(st.lists(st.integers(4, tiny_tokenizer().vocab_size - 1), min_size=1, max_size=20))
def test_assemble_keeps_arbitrary_reply_tokens(ids: list[int]) -> None:
    """Any ids that a model may generate stay as they are."""
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
def test_assemble_template_that_rewrites_history_is_not_append_only(name: str) -> None:
    tokenizer, memory = tokenizer_with(REWRITES[name]), Memory()
    first = assemble(tokenizer, chat("Hi", system="Be brief"))
    assert first.is_append_only
    memory.say(first, "hm</think>Hello", (5, 6, 7))
    messages = chat("Hi", "hm</think>Hello", "And?", system="Be brief")
    second = assemble(tokenizer, messages, memory.known)
    assert not second.is_append_only and second.num_reused == 0 and second.base_message is None
    assert list(second.token_ids) == tokenizer.render_ids(messages)


def test_assemble_uses_the_latest_known_reply() -> None:
    tokenizer, memory = tiny_tokenizer(), Memory()
    first = assemble(tokenizer, chat("a"))
    memory.say(first, "b", (9, 9, 9))
    edited = assemble(tokenizer, chat("a", "b", "c", "written by the client", "d"), memory.known)
    assert edited.base_message == 1 and edited.token_ids[: edited.num_reused] == (*first.token_ids, 9, 9, 9)
    memory.say(assemble(tokenizer, chat("a", "b", "c"), memory.known), "written by the client", (8, 8))
    assert assemble(tokenizer, chat("a", "b", "c", "written by the client", "d"), memory.known).base_message == 3


def test_assemble_looks_back_a_bounded_number_of_replies() -> None:
    tokenizer, asked = tiny_tokenizer(), []

    def known(index: int, head: str, message: Message) -> None:
        asked.append(index)

    texts = [str(number) for number in range(101)]
    assert list(assemble(tokenizer, chat(*texts), known).token_ids) == tokenizer.render_ids(chat(*texts))
    assert asked == list(range(99, 99 - 2 * MAX_LOOKBACK, -2))


def test_assemble_first_assistant_message_is_tokenised_as_text() -> None:
    """No reply of this server can precede a conversation's first message."""
    messages = [Message(role="assistant", content="Welcome"), Message(role="user", content="Hi")]

    def known(index: int, head: str, message: Message) -> Known:
        raise AssertionError("asked")

    assert list(assemble(tiny_tokenizer(), messages, known).token_ids) == tiny_tokenizer().render_ids(messages)


SYSTEM = "You are kind. Answer <|im_end|> in é words."
PUBLIC = SharedSystemPrompts(["Other", SYSTEM + "\n"])
FOLDED = {  # the system text stands inside the first user turn, or nowhere
    "inst": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.index == 2 %}<<SYS>>{{ messages[0].content }}<</SYS>>{% endif %}{{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "refuses": (
        "{% if messages[-1].role == 'system' %}{{ raise_exception('alone') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "drops": "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}
short_texts = st.text(alphabet="ab \n,é🎉<|>", max_size=8)


def shared_chat(*texts: str, system: str = SYSTEM) -> list[Message]:
    """Return a chat that begins with the declared system prompt."""
    return chat(*texts, system=system)


def num_public(tokenizer: Tokenizer, messages: list[Message]) -> int:
    return PUBLIC.count_shared_tokens(tokenizer, messages, assemble(tokenizer, messages))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(APPEND_ONLY)), short_texts, short_texts)
def test_shared_tokens_are_independent_of_the_messages_after_the_system_prompt(name: str, one: str, other: str) -> None:
    tokenizer = tokenizer_with(APPEND_ONLY[name])
    alone = tokenizer.render([Message(role="system", content=SYSTEM)], add_generation_prompt=False)
    prompts = [assemble(tokenizer, shared_chat(texts)) for texts in (one, other)]
    counts = [num_public(tokenizer, shared_chat(texts)) for texts in (one, other)]
    for prompt, count in zip(prompts, counts, strict=True):
        assert tokenizer.encode_rendered(alone)[:count] == list(prompt.token_ids[:count])
        # Only a token that the system text shares with what follows may be missing.
        assert len(tokenizer.encode_rendered(alone)) - count <= (name == "words")
    shared = min(counts)
    assert prompts[0].token_ids[:shared] == prompts[1].token_ids[:shared]


def test_shared_tokens_of_chatml_end_with_the_system_turn() -> None:
    tokenizer = tiny_tokenizer()
    expected = len(tokenizer.encode_rendered(tokenizer.render(shared_chat(), add_generation_prompt=False)))
    for texts in (["Hi"], ["", "x", "y"], ["\n"]):
        assert num_public(tokenizer, shared_chat(*texts)) == expected > 10
    longer = [*shared_chat(), Message(role="system", content="private"), *shared_chat("Hi")[1:]]
    assert num_public(tokenizer, longer) == expected


def test_shared_tokens_exclude_a_token_that_spans_into_the_user_turn() -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    public, alone = SharedSystemPrompts(["Be kind."]), tokenizer.encode("Be kind.\n")
    assert tokenizer.encode("\n\n") != tokenizer.encode("\n") * 2, "another text, please: these must be one token"
    for texts, count in (("Hi", len(alone)), ("\n", len(alone) - 1)):
        messages = shared_chat(texts, system="Be kind.")
        assert public.count_shared_tokens(tokenizer, messages, assemble(tokenizer, messages)) == count


@pytest.mark.parametrize("texts", [SYSTEM, SYSTEM + "\n"])
def test_shared_tokens_ignore_a_final_newline_of_the_declared_file(texts: str) -> None:
    assert num_public(tiny_tokenizer(), shared_chat("Hi", system=texts)) > 10


@pytest.mark.parametrize("system", [SYSTEM + " ", SYSTEM[:-1], SYSTEM.upper(), "", "Othe"])
def test_shared_tokens_of_other_text_are_zero(system: str) -> None:
    assert num_public(tiny_tokenizer(), shared_chat("Hi", system=system)) == 0


def test_shared_tokens_need_the_system_message_first() -> None:
    tokenizer = tiny_tokenizer()
    assert num_public(tokenizer, [Message(role="user", content=SYSTEM)]) == 0
    assert num_public(tokenizer, [*shared_chat("Hi")[1:], *shared_chat()]) == 0
    assert SharedSystemPrompts().count_shared_tokens(tokenizer, [], assemble(tokenizer, shared_chat("Hi"))) == 0


@pytest.mark.parametrize("template", [*FOLDED.values(), REWRITES["system moves to the last turn"]])
def test_shared_tokens_of_templates_that_move_the_system_text_are_zero(template: str) -> None:
    assert num_public(tokenizer_with(template), shared_chat("Hi")) == 0


def test_shared_tokens_of_a_template_with_the_time_are_counted_again() -> None:
    """A cached count of an older rendering must not be used."""
    first, then = (tokenizer_with(f"{day} {CHATML}") for day in ("monday", "friday"))
    for tokenizer in (first, then, first, then):
        expected = len(tokenizer.encode_rendered(tokenizer.render(shared_chat(), add_generation_prompt=False)))
        assert num_public(tokenizer, shared_chat("Hi")) == expected


def test_shared_tokens_of_a_later_turn_are_the_same() -> None:
    tokenizer, memory = tiny_tokenizer(), Memory()
    first = assemble(tokenizer, shared_chat("Hi"))
    memory.say(first, "Hello", (5, 6, 7))
    messages = shared_chat("Hi", "Hello", "And?")
    second = assemble(tokenizer, messages, memory.known)
    assert second.num_reused
    assert PUBLIC.count_shared_tokens(tokenizer, messages, second) == num_public(tokenizer, shared_chat("Hi"))
