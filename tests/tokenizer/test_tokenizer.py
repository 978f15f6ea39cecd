"""Model folders: what is read, what is refused, and token-exact suffixes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from chatcache.errors import InvalidRequestError, ModelFolderError
from chatcache.tokenizer.tokenizer import Tokenizer, read_tokenizer
from tests.tokenizer.tokenizers import CHATML, INSTRUCT, KINDS, THINKING, backend_of, write_folder

USER = {"role": "user", "content": "Hello, how are you?"}
REPLY = {"role": "assistant", "content": "Well, thank you."}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(write_folder(tmp_path_factory.mktemp("chatml"), template=CHATML))


def test_folder(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_folder(tmp_path, template=CHATML))
    backend = backend_of("bytelevel")
    assert tokenizer.vocab_size == backend.get_vocab_size() == len(tokenizer.token_bytes)
    assert tokenizer.eos_token_ids == (backend.token_to_id("</s>"),)
    assert tokenizer.has_chat_template
    assert {tokenizer.token_bytes[i] for i in tokenizer.special_ids} >= {b"<s>", b"</s>", b"<|im_end|>"}
    assert tokenizer.encode("Hello", add_special_tokens=True) == [
        backend.token_to_id("<s>"),
        *tokenizer.encode("Hello"),
    ]


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 9}, (3, 1)),
        ({"eos_token_id": [3, 1, 3]}, {}, (3, 1)),
        ({}, {"eos_token_id": 9}, (9, 1)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 7}}, (7, 1)),
        (None, None, (1,)),
    ],
)
def test_eos_ids(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object] | None, want: tuple[int, ...]
) -> None:
    write_folder(tmp_path)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert read_tokenizer(tmp_path).eos_token_ids == want


def test_a_named_token_becomes_special_and_unknown_names_add_no_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, eos_token="<think>", pad_token="<nowhere>")
    tokenizer = read_tokenizer(folder)
    (think,) = tokenizer.encode("<think>")
    assert think in tokenizer.special_ids and tokenizer.eos_token_ids == (think,)
    assert tokenizer.vocab_size == backend_of("bytelevel").get_vocab_size()


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    backend = backend_of("bytelevel")
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    text = "Hello, how are you? I am well, thank you."
    assert read_tokenizer(folder).encode(text) == backend_of("bytelevel").encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{}", "not a tokenizer file"),
        ("tokenizer_config.json", "{nope", "JSON"),
        ("tokenizer_config.json", "[1]", "JSON object"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "eos_token_id"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template"),
        ("chat_template.jinja", "{% if %}", "line 1"),
    ],
)
def test_a_bad_folder_names_the_file(tmp_path: Path, file: str, content: str | None, reason: str) -> None:
    folder = write_folder(tmp_path)
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ModelFolderError, match=reason) as caught:
        read_tokenizer(folder)
    assert file in caught.value.message


def test_given_template_replaces_that_of_the_folder(tmp_path: Path) -> None:
    folder, own = write_folder(tmp_path / "model", template="config"), tmp_path / "own.jinja"
    own.write_text("own {{ messages[0].content }}")
    assert read_tokenizer(folder, own).render([USER]) == f"own {USER['content']}"
    own.write_text("{% if %}")
    with pytest.raises(ModelFolderError, match=r"own\.jinja.*line 1"):
        read_tokenizer(folder, own)
    own.unlink()
    with pytest.raises(ModelFolderError, match=r"own\.jinja: not readable"):
        read_tokenizer(folder, own)


def test_template_sources_in_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, template="config")
    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert read_tokenizer(folder).render([USER]) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert read_tokenizer(folder).render([USER]) == "file"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write_folder(folder, chat_template=named)
    assert read_tokenizer(folder).render([USER]) == "default"
    write_folder(folder)
    assert read_tokenizer(folder).render([USER]) == "processor"
    (folder / "chat_template.json").rename(folder / "processor_config.json")
    assert read_tokenizer(folder).render([USER]) == "processor"


def test_template_that_reads_parts_only_gets_text_as_a_part(tmp_path: Path) -> None:
    """As the templates of SmolVLM and LLaVA, which loop over the parts of a content."""
    loop = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    tokenizer = read_tokenizer(
        write_folder(tmp_path, template="{% for message in messages %}" + loop + "|{% endfor %}")
    )
    parts = [{"type": "text", "text": "Yes"}]
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": parts}]
    assert tokenizer.render(chat) == "Hello|Yes|"
    both = "{{ messages[0].content if messages[0].content is string else 'parts' }}"
    assert read_tokenizer(write_folder(tmp_path, template=both)).render(chat) == "Hello"


def test_an_older_folder_is_converted(tmp_path: Path) -> None:
    """GPT-2's vocab.json + merges.txt, without tokenizer.json."""
    state = json.loads(backend_of("bytelevel").to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps({**state["vocab"], "<|endoftext|>": len(state["vocab"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = read_tokenizer(tmp_path)
    text = "Hello, how are you? 你好"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == backend_of("bytelevel").encode(text, add_special_tokens=False).ids


def test_no_template_is_the_requests_fault(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.render([USER])
    assert caught.value.param == "messages"


def test_lone_surrogates_are_refused(chatml: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        chatml.encode("a\ud800")


def test_render_ids(chatml: Tokenizer) -> None:
    ids = chatml.render_ids([USER])
    assert chatml.decode(ids, skip_special_tokens=False) == chatml.render([USER])
    (start,) = chatml.encode("<|im_start|>")
    assert ids.count(start) == 3


def test_suffix_ids_extend_what_is_stored(chatml: Tokenizer) -> None:
    """Prompt ids + whatever the model said, in its own tokens + the new suffix: history is never encoded again."""
    before = chatml.render([USER])
    stored = chatml.encode(before) + [token for char in REPLY["content"] for token in chatml.encode(char)]
    stored += chatml.encode("<|im_end|>")
    after = chatml.render([USER, REPLY, USER])
    suffix = chatml.suffix_ids(before + REPLY["content"] + "<|im_end|>", after)
    assert suffix is not None
    assert chatml.decode(stored + suffix, skip_special_tokens=False) == after
    assert suffix == chatml.encode(after[len(before + REPLY["content"] + "<|im_end|>") :])


def test_suffix_ids_of_a_template_that_rewrites_history(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_folder(tmp_path, template=THINKING))
    thought = {"role": "assistant", "content": "<think>hm</think>\n\nWell."}
    before = tokenizer.render([USER]) + thought["content"] + "<|im_end|>"
    assert tokenizer.suffix_ids(before, tokenizer.render([USER, thought])) is not None
    assert tokenizer.suffix_ids(before, tokenizer.render([USER, thought, USER])) is None


@pytest.mark.parametrize("kind", KINDS)
@given(before=st.text("ab ,.\nH你", max_size=12), after=st.text("ab ,.\nH你", max_size=12))
@settings(max_examples=80, deadline=None)
def test_a_suffix_adds_no_space_of_its_own(kind: str, before: str, after: str) -> None:
    tokenizer = Tokenizer(backend_of(kind))
    head = tokenizer.encode("x" + before)
    suffix = tokenizer.suffix_ids("x" + before, "x" + before + after)
    assert suffix is not None
    assert tokenizer.decode(head + suffix) == tokenizer.decode(head) + after


@pytest.mark.parametrize("kind", KINDS)
def test_a_suffix_behind_a_control_token_is_what_the_whole_chat_has(tmp_path: Path, kind: str) -> None:
    tokenizer = read_tokenizer(write_folder(tmp_path, kind, template=INSTRUCT))
    before, after = tokenizer.render([USER, REPLY]), tokenizer.render([USER, REPLY, USER])
    suffix = tokenizer.suffix_ids(before, after)
    assert suffix is not None
    assert tokenizer.encode(before) + suffix == tokenizer.encode(after)


def test_a_control_token_that_swallows_white_space() -> None:
    backend = backend_of("bytelevel")
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer = Tokenizer(backend)
    suffix = tokenizer.suffix_ids("Hello<|end|>", "Hello<|end|> \n how")
    assert suffix is not None
    assert tokenizer.encode("Hello<|end|>") + suffix == tokenizer.encode("Hello<|end|> \n how")


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_have_the_ids_of_their_parts(kind: str) -> None:
    """They take another way through the library."""
    tokenizer = Tokenizer(backend_of(kind))
    line = "How much wood? 中文 <|im_end|>"
    assert tokenizer.encode(line * 400, add_special_tokens=True) == [
        *tokenizer.encode("", add_special_tokens=True),
        *(tokenizer.encode(line) * 400),
    ]
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("x" * 5_000 + "\ud800")


def test_a_long_text_lets_other_threads_run() -> None:
    """Encoding a megabyte for one client must not block the event loop for the others."""
    tokenizer = Tokenizer(backend_of("bytelevel"))
    beats, done = [0], threading.Event()

    def beat() -> None:
        while not done.is_set():
            time.sleep(0.0001)
            beats[0] += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        tokenizer.encode("How much wood? " * 40_000)
    finally:
        done.set()
        thread.join()
    assert beats[0] > 20  # without: before, after, and one list being made
