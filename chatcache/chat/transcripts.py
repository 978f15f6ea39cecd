"""What this server said lately: a client that resends it as text gets the same tokens, hence the same pages."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class Transcripts:
    """A least-recently-used map from (namespace, rendering before a reply, reply text) to their token ids.

    A text has many tokenisations and a model need not generate the one its tokenizer would choose. Surrounding white
    space of the reply does not count: clients trim. Bounded by the tokens it holds; forgetting costs only page hits.
    """

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._lock = threading.Lock()  # long prompts are assembled on worker threads
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()

    def remember(self, namespace: str, head: str, reply: str, token_ids: Sequence[int]) -> None:
        key = _key(namespace, head, reply)
        with self._lock:
            self._num_tokens -= len(self._ids.pop(key, ()))
            self._ids[key] = array("i", token_ids)
            self._num_tokens += len(token_ids)
            while self._num_tokens > self._max_tokens:
                _, dropped = self._ids.popitem(last=False)
                self._num_tokens -= len(dropped)

    def recall(self, namespace: str, head: str, reply: str) -> tuple[int, ...] | None:
        key = _key(namespace, head, reply)
        with self._lock:
            ids = self._ids.get(key)
            if ids is None:
                return None
            self._ids.move_to_end(key)
            return tuple(ids)


def _key(namespace: str, head: str, reply: str) -> bytes:
    digest = hashlib.sha256()
    for part in (namespace, head, reply.strip()):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
