"""System prompts that the operator declared public: their pages are shared by everybody, what follows them by nobody.

Which tokens those are is settled here, from the server's own list, and nowhere else: a client can name a prompt only by
sending its exact text.

    rendering   <|system|>You are kind.<|end|><|user|>my secret<|end|><|assistant|>
    alone       <|system|>You are kind.<|end|>
                `---- num_public_tokens ------'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chatcache.chat.prompt import Message, Prompt, Renderer
from chatcache.errors import InvalidRequest
from chatcache.text.quoting import unquote


class PublicPrompts:
    """The declared texts, with or without the line end that files have. Threads may share it."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = frozenset(form for text in texts for form in (text, text.removesuffix("\n").removesuffix("\r")))
        self._ids: dict[str, tuple[int, ...]] = {}

    def num_tokens(self, tokenizer: Renderer, messages: Sequence[Message], prompt: Prompt) -> int:
        """Count the leading tokens of `prompt` that hold its declared system message and nothing else.

        0 without one, and for templates that write it anywhere but at the start.
        """
        if not messages or messages[0]["role"] != "system" or messages[0]["content"] not in self._texts:
            return 0
        try:
            alone = tokenizer.render(messages[:1], add_generation_prompt=False)
        except InvalidRequest:  # there are templates that render no system message, or not alone
            return 0
        if not prompt.text.startswith(alone) or messages[0]["content"].strip() not in unquote(alone):
            return 0
        ids = self._ids.get(alone)
        if ids is None:
            ids = tuple(tokenizer.encode_rendered(alone))
            if len(self._ids) > 2 * len(self._texts):  # a template that writes the date renders anew every day
                self._ids.clear()
            self._ids[alone] = ids
        same = (ours == theirs for ours, theirs in zip(ids, prompt.token_ids, strict=False))
        return next((count for count, equal in enumerate(same) if not equal), min(len(ids), len(prompt.token_ids)))
