"""Tokenizer of a model folder.

Encode text, decode ids, render chats with the model's template.

Loading runs no code from the folder except its chat template, which runs in a sandbox.

`TokenByteTable` holds the bytes that each token adds to the text. It is computed from the decoder of the tokenizer:
byte-level BPE (GPT-2's byte map) or a SentencePiece-style chain (metaspace, <0xNN> byte fallback, one leading space
stripped). Any other decoder is probed: each token is decoded after a fixed anchor token, and the text after the anchor
is recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from chatcache.errors import InvalidRequestError, ModelFolderError
from chatcache.tokenizer.chat_template import TOKEN_BREAK, ChatTemplate, Message, SpecialTokenEscaper


class LeadingSpace(Enum):
    """Rule for the spaces that a decoder drops from the first token of a text."""

    KEEP = "nothing"
    SPACE = "one leading space"
    SPACES = "every space in the token"

    def hidden(self, piece: bytes) -> bytes:
        """Return a mask of the bytes that are dropped if `piece` is the first token of a text.

        One byte per byte of `piece`: 0 if it is dropped, else 1.
        """
        if self is LeadingSpace.SPACES:
            return bytes(byte != 0x20 for byte in piece)
        if self is LeadingSpace.SPACE and piece.startswith(b" "):
            return b"\x00" + b"\x01" * (len(piece) - 1)
        return b"\x01" * len(piece)


@dataclass(frozen=True, slots=True)
class TokenByteTable:
    """Bytes of each token (empty for unused ids) and the rule for the first token."""

    by_id: tuple[bytes, ...]
    leading_space: LeadingSpace


def build_byte_table(backend: Backend) -> TokenByteTable:
    """Compute the bytes of every token of a vocabulary."""
    vocab = backend.get_vocab(with_added_tokens=True)
    by_id = [""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        by_id[index] = token
    steps = _decoder_steps(backend)
    if all(_is_supported(step) for step in steps) and steps:
        return TokenByteTable(tuple(_token_to_bytes(steps, token) for token in by_id), _leading_space(steps))
    return _probe_decoder(backend, by_id)


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """Return the steps of the decoder, as the library serialises them."""
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return _flatten(state)


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _flatten(inner)]


def _is_supported(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace":
            return True
        case "Replace":
            return "String" in step["pattern"]
        case "Strip":
            return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
        case _:
            return False


def _leading_space(steps: list[dict[str, Any]]) -> LeadingSpace:
    for step in steps:
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return LeadingSpace.SPACES
        if step["type"] == "Strip" and step["start"] == 1:
            return LeadingSpace.SPACE
    return LeadingSpace.KEEP


def _token_to_bytes(steps: list[dict[str, Any]], token: str) -> bytes:
    text = token
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                return _undo_byte_map(text)
            case "ByteFallback":
                if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                    try:
                        return bytes([int(text[3:5], 16)])
                    except ValueError:
                        pass
            case "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                text = text.replace(step["replacement"], " ")
    return text.encode("utf-8", "surrogatepass")


def _byte_map() -> dict[int, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters.

    Printable Latin-1 characters stand for themselves, U+0100, U+0101, ... for the other bytes in order. Code points
    below 256 that are not used by the map map to a character outside Latin-1, so that a text that contains them is
    recognised.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    outside = dict.fromkeys(others, 65535)
    return outside | {byte: byte for byte in plain} | {0x100 + place: byte for place, byte in enumerate(others)}


_BYTES = _byte_map()


def _undo_byte_map(text: str) -> bytes:
    """Convert the text of a token from GPT-2's byte map back to bytes.

    Added tokens are not mapped: they are encoded as UTF-8.
    """
    try:
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _probe_decoder(backend: Backend, by_id: list[str]) -> TokenByteTable:
    """Probe a decoder of unknown type: decode each token after a fixed anchor token."""
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    anchor = next((i for i, token in enumerate(by_id) if token and i not in special and backend.decode([i])), None)
    if anchor is None:
        return TokenByteTable(tuple(token.encode() for token in by_id), LeadingSpace.KEEP)
    head = len(backend.decode([anchor], skip_special_tokens=False))
    after = [
        backend.decode([anchor, index], skip_special_tokens=False)[head:] if token else ""
        for index, token in enumerate(by_id)
    ]
    drops_space = after[anchor].startswith(" ") and not backend.decode([anchor]).startswith(" ")
    return TokenByteTable(
        tuple(text.encode() for text in after), LeadingSpace.SPACE if drops_space else LeadingSpace.KEEP
    )


_ANCHOR = "\ue000"  # private use: no token of any vocabulary joins it to what follows
_LONG_CHARS = 4_000


class Tokenizer:
    """Encode, decode and render for one model.

    Stateless after construction, so threads may share it.
    """

    def __init__(
        self, backend: Backend, *, eos_token_ids: Sequence[int] = (), template: ChatTemplate | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self.eos_token_ids = tuple(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = tuple(sorted((token.content for token in added.values()), key=len, reverse=True))
        special = {token.content for token in added.values() if token.special}
        # Some models' turn markers are not special tokens. Added tokens that the template writes are treated alike.
        marks = {token for token in self._added if token.strip() and token in self.template_source}
        self._in_replies, self._in_messages = SpecialTokenEscaper(special), SpecialTokenEscaper(special | marks)

    @property
    def vocab_size(self) -> int:
        """Highest token id + 1. The model's embedding may have more rows (padding)."""
        return len(self.token_bytes)

    @property
    def has_chat_template(self) -> bool:
        """True if the model folder has a chat template."""
        return self._template is not None

    @property
    def template_source(self) -> str:
        """Source of the chat template; "" if the model has none."""
        return self._template.source if self._template is not None else ""

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads, such as `enable_thinking`."""
        return self._template.variable_names if self._template is not None else frozenset()

    @property
    def reserved_variables(self) -> frozenset[str]:
        """Names of the variables that have a meaning of their own in the chat template."""
        return self._template.reserved_names if self._template is not None else frozenset()

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts of the added tokens (special or not), longest first."""
        return self._added

    @cached_property
    def eos_texts(self) -> tuple[str, ...]:
        """Texts of the tokens that end a reply."""
        found = (self._backend.id_to_token(token) for token in self.eos_token_ids)
        return tuple(text for text in found if text)

    def special_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those `texts` that are special tokens."""
        found = {text: self._backend.token_to_id(text) for text in texts}
        return {text: index for text, index in found.items() if index in self.special_ids}

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Bytes that each token adds to the text, indexed by token id."""
        return self._byte_table.by_id

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes of all tokens.

        Equal digests mean that every id decodes to the same text.
        """
        digest = hashlib.sha256()
        for piece in self.token_bytes:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()

    @property
    def leading_space(self) -> LeadingSpace:
        """Which spaces the decoder drops from the first token of a text."""
        return self._byte_table.leading_space

    @cached_property
    def _byte_table(self) -> TokenByteTable:
        return build_byte_table(self._backend)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text.

        Raises: InvalidRequestError if it is not valid Unicode or the tokenizer cannot encode it.
        """
        try:
            if len(text) <= _LONG_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # releases the GIL while it runs; `encode` does not
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError(
                "text must be valid Unicode (a lone surrogate was found)", param="messages"
            ) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequestError("this model's tokenizer cannot encode this text", param="messages") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text. Unknown ids are skipped; bytes that are not valid UTF-8 become U+FFFD."""
        shown = [
            self.token_bytes[token]
            for token in ids
            if 0 <= token < len(self.token_bytes) and not (skip_special_tokens and token in self.special_ids)
        ]
        first = next((place for place, piece in enumerate(shown) if piece), None)
        if first is not None:
            mask = self.leading_space.hidden(shown[first])
            shown[first] = bytes(byte for byte, keep in zip(shown[first], mask, strict=True) if keep)
        return b"".join(shown).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a chat with the model's template.

        `variables` (tools, enable_thinking, ...) are passed to it.

        Special tokens that occur in the text of a message, tool or variable are escaped, so that `encode_after`
        encodes them as ordinary text.
        Raises: InvalidRequestError (param "messages") if the model has no template or the template rejects the chat.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: use completions (Ollama: raw), or serve it with --chat-template",
                param="messages",
            )
        variables = {name: self._in_messages.escape(value) for name, value in variables.items()}
        return self._template.render(
            [self._escaper(message.get("role")).escape(dict(message)) for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def render_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Render a chat and encode it. The template writes the special tokens itself."""
        return self.encode_rendered(self.render(messages, add_generation_prompt, **variables))

    def encode_rendered(self, rendering: str, add_special_tokens: bool = False) -> list[int]:
        """Encode the rendering of a chat, which contains special tokens and token breaks.

        `add_special_tokens`: add the tokens that start or end a text (BOS).
        """
        ids = self.encode_after("", rendering)
        if not add_special_tokens:
            return ids
        bare, framed = self.encode(_ANCHOR), self.encode(_ANCHOR, add_special_tokens=True)
        at = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        return [*framed[:at], *ids, *framed[at + len(bare) :]]

    def escape_reply(self, text: str) -> str:
        """Return the text of an assistant message as `render` writes it, special tokens escaped."""
        quoted: str = self._in_replies.escape(text)
        return quoted

    def encode_message(self, text: str) -> list[int]:
        """Encode the text of a user message as `render` writes it, special tokens escaped."""
        return self.encode_rendered(self._in_messages.escape(text))

    def _escaper(self, role: object) -> SpecialTokenEscaper:
        """Return the escaper for a role.

        In replies, markers that the template parses (`</think>`) stay unescaped.
        """
        return self._in_replies if role == "assistant" else self._in_messages

    def suffix_ids(self, rendered_before: str, rendered_after: str) -> list[int] | None:
        """Encode the text that `rendered_after` adds to `rendered_before`.

        Returns None if `rendered_after` does not start with `rendered_before` (templates that rewrite history): then
        stored ids of the earlier rendering cannot be reused.
        """
        if not rendered_after.startswith(rendered_before):
            return None
        return self.encode_after(rendered_before, rendered_after[len(rendered_before) :])

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode `text` as it would be encoded when it follows `before`.

        Only the end of `before` matters: some tokenizers prefix the first word of a text (or of a text after a special
        token) with a space, and some special tokens absorb the white space after them. No token spans a token break.
        """
        ids: list[int] = []
        for part in text.split(TOKEN_BREAK):
            ids += self._encode_part(before, part)
            before = part or before
        return ids

    def _encode_part(self, before: str, text: str) -> list[int]:
        control = next((token for token in self._added if before.endswith(token)), None)
        anchors = (control,) if control is not None else (_ANCHOR, "\n") if before and self._prefixes_text else ()
        for anchor in anchors:
            head, ids = self.encode(anchor), self.encode(anchor + text)
            if ids[: len(head)] == head:
                return ids[len(head) :]
        return self.encode(text)

    @cached_property
    def _prefixes_text(self) -> bool:
        """True if a word is encoded differently at the start of a text than inside it."""
        head, ids = self.encode(_ANCHOR), self.encode(_ANCHOR + "a")
        return ids[: len(head)] == head and ids[len(head) :] != self.encode("a")


def is_panic(error: BaseException) -> bool:
    """Return True for errors of the Rust library, including `PanicException`, a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


_PROBES = ("a" * 64 + "!", "A" * 64 + "\n", " " * 64 + "x", "0" * 64 + ".", "é" * 32 + "😀", "a b" * 32 + "\x00")
_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "sentencepiece.bpe.model")


def read_tokenizer(path: str | Path, template_file: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a model folder. `template_file`: a chat template instead of the folder's.

    Raises: ModelFolderError naming the file and the reason.
    """
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
    backend = _load_backend(folder)
    _mark_special(backend, named.values())
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    template = _load_template(folder, config, named, template_file)
    return Tokenizer(backend, eos_token_ids=_eos_ids(folder, eos), template=template)


def _load_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
            for text in _PROBES:  # a regex that backtracks without limit fails on one of these
                backend.encode(text)
        except BaseException as error:  # the library raises bare Exception, and panics
            if not is_panic(error):
                raise
            raise ModelFolderError(f"{file}: not a tokenizer file: {_first_line(error)}") from error
        return backend
    if not any((folder / name).is_file() for name in _OLDER_FILES):
        raise ModelFolderError(f"{file}: missing; the folder has no tokenizer")
    return _convert_backend(folder)


def _mark_special(backend: Backend, tokens: Iterable[str]) -> None:
    """Mark the named tokens as special where the tokenizer file does not, as transformers does."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [token for token in tokens if token not in special and backend.token_to_id(token) is not None]
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _convert_backend(folder: Path) -> Backend:
    """Convert an older tokenizer format with transformers, which is slow to import."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        backend: Backend = converted.backend_tokenizer
    except Exception as error:
        raise ModelFolderError(
            f"{folder}: no tokenizer.json, and its older files do not convert: {_first_line(error)}"
        ) from error
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if there is no file.

    Raises: ModelFolderError if it holds anything else.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFolderError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: must hold a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named tokens (`eos_token`, ...) of a tokenizer config.

    Strings, or objects with `content`.
    """
    named: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    for key, value in {**config, **(extra if isinstance(extra, dict) else {})}.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            named[key] = value
    return named


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Collect the EOS ids of generation_config.json (else config.json) and of the tokenizer."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        if value is not None:
            found = list(value) if isinstance(value, list) else [value]
            break
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
        raise ModelFolderError(f"{folder / name}: eos_token_id must be a token id or a list of them")
    if tokenizer_eos is not None:
        found.append(tokenizer_eos)
    return tuple(dict.fromkeys(found))


def _load_template(
    folder: Path, config: dict[str, Any], variables: dict[str, str], own_file: Path | None
) -> ChatTemplate | None:
    """Load the chat template from `own_file`, else from the folder.

    There from its own file, else from tokenizer_config.json, which holds one template or a list with one named
    "default", else from a file of a processor.
    """
    file = own_file or folder / "chat_template.jinja"
    source: object = None
    if own_file is not None or file.is_file():
        try:
            source = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{file}: not readable: {error}") from error
    else:
        file, source = folder / "tokenizer_config.json", config.get("chat_template")
    for name in ("chat_template.json", "processor_config.json"):
        if source is None:
            file = folder / name
            source = _read_json(file).get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFolderError(f"{file}: chat_template must be text")
    template = ChatTemplate(source, origin=str(file), variables=variables)
    template.check(str(file))
    return template
