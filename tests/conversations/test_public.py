"""Which tokens of a prompt are a declared system prompt: all of it, and never a token more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.prompt import Message, SharedSystemPrompts, assemble
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.conversations.test_prompt import APPEND_ONLY, REWRITES, Memory
from tests.gateway.serving import CHATML, tiny_tokenizer, tokenizer_with

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
texts = st.text(alphabet="ab \n,é🎉<|>", max_size=8)


def chat(*said: str, system: str = SYSTEM) -> list[Message]:
    turns = [Message(role=("user", "assistant")[at % 2], content=text) for at, text in enumerate(said)]
    return [Message(role="system", content=system), *turns]


def num_public(tokenizer: Tokenizer, messages: list[Message]) -> int:
    return PUBLIC.count_shared_tokens(tokenizer, messages, assemble(tokenizer, messages))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(APPEND_ONLY)), texts, texts)
def test_public_tokens_hold_the_system_message_and_nothing_of_anybody(name: str, one: str, other: str) -> None:
    tokenizer = tokenizer_with(APPEND_ONLY[name])
    alone = tokenizer.render([Message(role="system", content=SYSTEM)], add_generation_prompt=False)
    prompts = [assemble(tokenizer, chat(said)) for said in (one, other)]
    counts = [num_public(tokenizer, chat(said)) for said in (one, other)]
    for prompt, count in zip(prompts, counts, strict=True):
        assert tokenizer.encode_rendered(alone)[:count] == list(prompt.token_ids[:count])
        # Only a token that the system text shares with what follows may be missing.
        assert len(tokenizer.encode_rendered(alone)) - count <= (name == "words")
    shared = min(counts)
    assert prompts[0].token_ids[:shared] == prompts[1].token_ids[:shared]


def test_chatml_counts_to_the_end_of_the_system_turn() -> None:
    tokenizer = tiny_tokenizer()
    expected = len(tokenizer.encode_rendered(tokenizer.render(chat(), add_generation_prompt=False)))
    for said in (["Hi"], ["", "x", "y"], ["\n"]):
        assert num_public(tokenizer, chat(*said)) == expected > 10
    longer = [*chat(), Message(role="system", content="private"), *chat("Hi")[1:]]
    assert num_public(tokenizer, longer) == expected


def test_a_token_that_the_system_text_shares_with_a_user_is_not_public() -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    public, alone = SharedSystemPrompts(["Be kind."]), tokenizer.encode("Be kind.\n")
    assert tokenizer.encode("\n\n") != tokenizer.encode("\n") * 2, "another text, please: these must be one token"
    for said, count in (("Hi", len(alone)), ("\n", len(alone) - 1)):
        messages = chat(said, system="Be kind.")
        assert public.count_shared_tokens(tokenizer, messages, assemble(tokenizer, messages)) == count


@pytest.mark.parametrize("said", [SYSTEM, SYSTEM + "\n"])
def test_a_line_end_of_the_file_does_not_matter(said: str) -> None:
    assert num_public(tiny_tokenizer(), chat("Hi", system=said)) > 10


@pytest.mark.parametrize("system", [SYSTEM + " ", SYSTEM[:-1], SYSTEM.upper(), "", "Othe"])
def test_only_the_exact_text_is_public(system: str) -> None:
    assert num_public(tiny_tokenizer(), chat("Hi", system=system)) == 0


def test_only_a_system_message_in_the_first_place_is_public() -> None:
    tokenizer = tiny_tokenizer()
    assert num_public(tokenizer, [Message(role="user", content=SYSTEM)]) == 0
    assert num_public(tokenizer, [*chat("Hi")[1:], *chat()]) == 0
    assert SharedSystemPrompts().count_shared_tokens(tokenizer, [], assemble(tokenizer, chat("Hi"))) == 0


@pytest.mark.parametrize("template", [*FOLDED.values(), REWRITES["system moves to the last turn"]])
def test_where_the_system_text_is_not_at_the_start_nothing_is_public(template: str) -> None:
    assert num_public(tokenizer_with(template), chat("Hi")) == 0


def test_a_template_that_writes_the_time_counts_anew() -> None:
    """A stale rendering must not be taken for the present one."""
    first, then = (tokenizer_with(f"{day} {CHATML}") for day in ("monday", "friday"))
    for tokenizer in (first, then, first, then):
        expected = len(tokenizer.encode_rendered(tokenizer.render(chat(), add_generation_prompt=False)))
        assert num_public(tokenizer, chat("Hi")) == expected


def test_a_later_turn_on_stored_tokens_counts_the_same() -> None:
    tokenizer, memory = tiny_tokenizer(), Memory()
    first = assemble(tokenizer, chat("Hi"))
    memory.say(first, "Hello", (5, 6, 7))
    messages = chat("Hi", "Hello", "And?")
    second = assemble(tokenizer, messages, memory.known)
    assert second.num_reused
    assert PUBLIC.count_shared_tokens(tokenizer, messages, second) == num_public(tokenizer, chat("Hi"))
