"""Idempotency keys: a repeated request returns the result of the first one."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request

from chatcache.conversations.store import Claim, ConversationStore, IdempotencyConflictError
from chatcache.errors import InvalidRequestError

HEADER = "Idempotency-Key"
REPLAYED_HEADER = {"idempotent-replayed": "true"}
KEY_PATTERN = re.compile("^[!-~]{1,255}$")
# Transport fields: the same request may use another transport.
_ENVELOPE = frozenset({"type", "stream", "stream_id", "idempotency_key"})


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """An `Idempotency-Key` and the digest of the request that it was sent with."""

    key: str
    digest: str

    @classmethod
    def create(cls, key: str, kind: str, body: Mapping[str, Any]) -> IdempotencyKey:
        """Build from a key and the JSON body.

        `kind`: the name of the operation. Raises: InvalidRequestError.
        """
        if not KEY_PATTERN.fullmatch(key):
            raise InvalidRequestError(
                "an Idempotency-Key has 1 to 255 visible ASCII characters, no spaces", param="idempotency_key"
            )
        content = {name: value for name, value in body.items() if name not in _ENVELOPE and value is not None}
        data = msgspec.json.encode([kind, content], order="deterministic")
        return cls(key, hashlib.sha256(data).hexdigest())

    @classmethod
    def from_request(cls, request: Request, kind: str, body: Mapping[str, Any]) -> IdempotencyKey | None:
        """Build from the request's header; None without one. Raises: InvalidRequestError."""
        key = request.headers.get(HEADER)
        return cls.create(key, kind, body) if key is not None else None

    def claim(self, target: str) -> Claim:
        """Build the record that reserves the key for the result with the id `target`."""
        return Claim(self.key, self.digest, target)

    def resolve(self, claim: Claim) -> str:
        """Return the id of the result of an earlier, equal request.

        Raises: IdempotencyConflictError if the key was used for a different request.
        """
        if claim.digest != self.digest:
            raise IdempotencyConflictError(claim)
        return claim.target

    async def find_target(self, store: ConversationStore, owner: str) -> str | None:
        """Look up the id of the result if this request was made before.

        Raises: IdempotencyConflictError.
        """
        claim = await store.find_claim(owner, self.key)
        return self.resolve(claim) if claim is not None else None


class KeyLocks:
    """Locks that serialise concurrent requests with the same idempotency key."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def get(self, owner: str, key: IdempotencyKey) -> asyncio.Lock:
        lock = self._locks.get((owner, key.key))
        if lock is None:
            lock = self._locks[owner, key.key] = asyncio.Lock()
        return lock
