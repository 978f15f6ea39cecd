"""Bounded memos of generated replies and tool calls, for clients that resend the whole history."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from chatcache.conversations.prompt import Known


class TokenMemo:
    """A bounded map from a reply's text to its original token ids and raw output.

    The key is the namespace, the rendering before the reply, and `prompt.reply_key`; leading and trailing white space
    is ignored because clients trim. A resent reply gets its original tokens, hence its cached pages: a text has many
    tokenisations, and the model need not generate the one that its tokenizer would choose. Bounded by the number of
    tokens; the least recently used are evicted, which costs only cache hits.
    """

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._lock = threading.Lock()  # long prompts are assembled on worker threads
        self._known: OrderedDict[bytes, tuple[array[int], str | None]] = OrderedDict()

    def remember(self, namespace: str, head: str, reply: str, token_ids: Sequence[int], raw: str | None = None) -> None:
        """Store the token ids of a prompt and its reply. `head`: the rendering before the reply.

        `raw`: the whole output of the model, None if it equals `reply`.
        """
        key = _key(namespace, head, reply)
        with self._lock:
            self._num_tokens -= len(self._known.pop(key, ((), None))[0])
            self._known[key] = array("i", token_ids), None if raw is None or raw.strip() == reply.strip() else raw
            self._num_tokens += len(token_ids)
            while self._num_tokens > self._max_tokens:
                _, (dropped, _) = self._known.popitem(last=False)
                self._num_tokens -= len(dropped)

    def recall(self, namespace: str, head: str, reply: str) -> Known | None:
        key = _key(namespace, head, reply)
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            self._known.move_to_end(key)
            ids, raw = found
            return Known(reply if raw is None else raw, tuple(ids))


class ArgumentMemo:
    """A bounded map from the id of a tool call to the arguments that the model wrote.

    Some clients send a call back with its arguments parsed and written anew (Anthropic's API has them as an object):
    other spacing and escapes would be other tokens, and the cached pages of the history would not match. Bounded by the
    number of characters; the least recently used are evicted, which costs only cache hits.
    """

    def __init__(self, max_chars: int = 8_000_000) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()

    def remember(self, namespace: str, call_id: str, arguments: str) -> None:
        self._num_chars += len(arguments) - len(self._known.pop((namespace, call_id), ""))
        self._known[namespace, call_id] = arguments
        while self._num_chars > self._max_chars:
            _, dropped = self._known.popitem(last=False)
            self._num_chars -= len(dropped)

    def recall(self, namespace: str, call_id: str, arguments: str) -> str:
        """Return the arguments as the model wrote them, or `arguments` if they have another value."""
        written = self._known.get((namespace, call_id))
        if written is None or not _is_same_json(written, arguments):
            return arguments
        self._known.move_to_end((namespace, call_id))
        return written


def _is_same_json(one: str, other: str) -> bool:
    try:
        return one == other or bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def _key(namespace: str, head: str, reply: str) -> bytes:
    digest = hashlib.sha256()
    for part in (namespace, head, reply.strip()):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
