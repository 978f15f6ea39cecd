"""A model's tokenizer: text to token ids and back, chats to text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from chatcache.errors import InvalidRequest
from chatcache.text.pieces import Lead, Pieces, pieces_of
from chatcache.text.quoting import SEAM, Quoter
from chatcache.text.template import ChatTemplate, Message

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
        self._in_replies, self._in_messages = Quoter(special), Quoter(special | marks)

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
    def lead(self) -> Lead:
        """What the decoder drops from the first token of a text."""
        return self._pieces.lead

    @cached_property
    def _pieces(self) -> Pieces:
        return pieces_of(self._backend)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text. Raises: InvalidRequest for text that is not valid Unicode."""
        try:
            if len(text) <= _LONG_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # of these two only the batch lets other threads run meanwhile
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("text must be valid Unicode (a lone surrogate was found)", param="messages") from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequest("this model's tokenizer cannot encode this text", param="messages") from error
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
        Raises: InvalidRequest (param "messages") without a template, or when the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use completions instead", param="messages")
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

    def _quoter(self, role: object) -> Quoter:
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
