"""The tokenizer and its template: lossless on any text, append-only on any history."""

import itertools
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chatcache.demo_model import model_path
from chatcache.demo_model.training.corpus import END, IGNORED, PAD, START, Encoder, render, stream

ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=40)}), max_size=6)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_path())


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_every_character_of_many_scripts_survives(tokenizer: Any) -> None:
    text = "".join(
        chr(code) for code in itertools.chain(range(0x20, 0x3000), range(0x4E00, 0x4F00), range(0x1F300, 0x1F700))
    )
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer("90210").input_ids) == 5


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert all(len(tokenizer(token).input_ids) == 1 for token in (START, END, PAD))


@settings(deadline=None)
@given(messages=MESSAGES)
def test_a_longer_history_begins_with_the_shorter_one(tokenizer: Any, messages: list[dict[str, str]]) -> None:
    texts = [tokenizer.apply_chat_template(messages[:count], tokenize=False) for count in range(1, len(messages) + 1)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    if messages:
        assert texts[-1] == render(messages)


def test_the_generation_prompt_is_how_an_answer_begins(tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "Hello!"}], tokenize=False)
    assert prompt == f"{START}user\nHi{END}\n{START}assistant\n"
    assert answered.startswith(prompt)


def test_targets_are_exactly_the_answers() -> None:
    raw = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    dialogues = list(itertools.islice(stream(9), 50))
    for dialogue, (_, targets) in zip(dialogues, Encoder(raw).encode(dialogues), strict=True):
        spoken = raw.decode(np.asarray(targets[targets != IGNORED]).tolist(), skip_special_tokens=False)
        answers = [message["content"] for message in dialogue if message["role"] == "assistant"]
        assert spoken == "".join(answer + END for answer in answers)
