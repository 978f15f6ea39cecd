"""A model's tokenizer: text to token ids and back, chats to text.

The tokenizer of a model folder. No code of the folder's is run but its sandboxed template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from chatcache.errors import InvalidRequestError, ModelFolderError
from chatcache.tokenizer.chat_template import SEAM, ChatTemplate, Message, SpecialTokenEscaper
from chatcache.tokenizer.token_bytes import LeadingSpace, TokenByteTable, pieces_of

_ANCHOR = "\ue000"  # private use: no token of any vocabulary joins it to what follows
_LONG_CHARS = 4_000


class Tokenizer:
    """Encode, decode and render for one model. Stateless after construction, so threads may share it."""

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
        # Some models' turn marks are not special; what a template itself writes is as good as control.
        marks = {token for token in self._added if token.strip() and token in self.template_source}
        self._in_replies, self._in_messages = SpecialTokenEscaper(special), SpecialTokenEscaper(special | marks)

    @property
    def vocab_size(self) -> int:
        """Highest id + 1; the model's own may be larger (padded)."""
        return len(self.token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template as its author wrote it, "" without one."""
        return self._template.source if self._template is not None else ""

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens beside the ordinary vocabulary, longest first."""
        return self._added

    def special_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those `texts` that are special tokens."""
        found = {text: self._backend.token_to_id(text) for text in texts}
        return {text: index for text, index in found.items() if index in self.special_ids}

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """What each token adds to the text. Index: token id."""
        return self._pieces.of

    @cached_property
    def digest(self) -> str:
        """What token ids mean here: equal where every id adds the same text."""
        digest = hashlib.sha256()
        for piece in self.token_bytes:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()

    @property
    def lead(self) -> LeadingSpace:
        """What the decoder drops from the first token of a text."""
        return self._pieces.lead

    @cached_property
    def _pieces(self) -> TokenByteTable:
        return pieces_of(self._backend)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text. Raises: InvalidRequestError for text that is not valid Unicode."""
        try:
            if len(text) <= _LONG_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # of these two only the batch lets other threads run meanwhile
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
        """Return the text of `ids`; unknown ids add nothing, bytes that are no UTF-8 become U+FFFD."""
        shown = [
            self.token_bytes[token]
            for token in ids
            if 0 <= token < len(self.token_bytes) and not (skip_special_tokens and token in self.special_ids)
        ]
        first = next((place for place, piece in enumerate(shown) if piece), None)
        if first is not None:
            mask = self.lead.hidden(shown[first])
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
        """Render a chat through the model's template; `variables` (tools, enable_thinking, ...) reach the template.

        Control tokens typed in a message or a tool come out seamed (`quoting`): `encode_after` encodes them as text.
        Raises: InvalidRequestError (param "messages") without a template, or when the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template: use completions instead", param="messages")
        if variables.get("tools"):
            variables["tools"] = self._in_messages.quote(variables["tools"])
        return self._template.render(
            [self._quoter(message.get("role")).quote(dict(message)) for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def render_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return the ids of the rendered chat (the template writes the special tokens itself)."""
        return self.encode_rendered(self.render(messages, add_generation_prompt, **variables))

    def encode_rendered(self, rendering: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a whole rendering, on request with what the tokenizer puts around any text."""
        ids = self.encode_after("", rendering)
        if not add_special_tokens:
            return ids
        bare, framed = self.encode(_ANCHOR), self.encode(_ANCHOR, add_special_tokens=True)
        at = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        return [*framed[:at], *ids, *framed[at + len(bare) :]]

    def quote_reply(self, text: str) -> str:
        """Return an assistant message's text as `render` writes it."""
        quoted: str = self._in_replies.quote(text)
        return quoted

    def _quoter(self, role: object) -> SpecialTokenEscaper:
        """Replies keep what a model makes and its template looks for (`</think>`), unless it is special."""
        return self._in_replies if role == "assistant" else self._in_messages

    def suffix_ids(self, rendered_before: str, rendered_after: str) -> list[int] | None:
        """Return the ids of what `rendered_after` adds to `rendered_before`, for ids that are already stored.

        None when the later text does not begin with the earlier one (templates that rewrite history): then nothing
        stored can be kept as it is.
        """
        if not rendered_after.startswith(rendered_before):
            return None
        return self.encode_after(rendered_before, rendered_after[len(rendered_before) :])

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode a rendering, or the rest of one, as it is encoded behind `before`, looking only at that one's end.

        No token spans a seam. What else differs from encoding it alone: some tokenizers put a space before the first
        word of a text, or of every text behind a control token, and some control tokens swallow white space behind.
        """
        ids: list[int] = []
        for part in text.split(SEAM):
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
        """Whether a word at the start of a text is encoded unlike the same word inside one."""
        head, ids = self.encode(_ANCHOR), self.encode(_ANCHOR + "a")
        return ids[: len(head)] == head and ids[len(head) :] != self.encode("a")


def is_panic(error: BaseException) -> bool:
    """Whether the library in Rust gave up (`pyo3_runtime.PanicException`, which is no Exception and has no home)."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


_PROBES = ("a" * 64 + "!", "A" * 64 + "\n", " " * 64 + "x", "0" * 64 + ".", "é" * 32 + "😀", "a b" * 32 + "\x00")
_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "sentencepiece.bpe.model")


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises: ModelFolderError naming the file and the reason."""
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
    backend = _load_backend(folder)
    _mark_special(backend, named.values())
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(backend, eos_token_ids=_eos_ids(folder, eos), template=_load_template(folder, config, named))


def _load_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
            for text in _PROBES:  # a pattern that gives up, gives up at something like this
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
    """Make the named tokens special, as transformers does, where the tokenizer has them but not as special."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [token for token in tokens if token not in special and backend.token_to_id(token) is not None]
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _convert_backend(folder: Path) -> Backend:
    """Let transformers convert an older tokenizer format. Slow to import, hence only where it is needed."""
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
    """Return the object in a JSON file, {} where there is none. Raises: ModelFolderError for anything else in it."""
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
    """Return the named tokens (`eos_token` ...) of a tokenizer config: each a string, or an object with `content`."""
    named: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    for key, value in {**config, **(extra if isinstance(extra, dict) else {})}.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            named[key] = value
    return named


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Collect the EOS ids: of generation_config.json, else config.json; and the tokenizer's own."""
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


def _load_template(folder: Path, config: dict[str, Any], variables: dict[str, str]) -> ChatTemplate | None:
    """Find the chat template: its own file, else tokenizer_config.json (one, or the list's "default")."""
    file = folder / "chat_template.jinja"
    source: object = None
    if file.is_file():
        try:
            source = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{file}: not readable: {error}") from error
    else:
        file, source = folder / "tokenizer_config.json", config.get("chat_template")
    if source is None:
        file = folder / "chat_template.json"
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
