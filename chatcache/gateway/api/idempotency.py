"""Requests that come again under one `Idempotency-Key`: what the first one made is answered again, and made once."""

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
_ENVELOPE = frozenset({"type", "stream", "stream_id", "idempotency_key"})  # how it came and goes, not what it says


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A key, and the digest of the request that came with it."""

    key: str
    digest: str

    @classmethod
    def create(cls, key: str, what: str, body: Mapping[str, Any]) -> IdempotencyKey:
        """`what`: a name for the kind of request. Raises: InvalidRequestError for what is no key."""
        if not KEY_PATTERN.fullmatch(key):
            raise InvalidRequestError(
                "an Idempotency-Key has 1 to 255 visible ASCII characters, no spaces", param="idempotency_key"
            )
        said = {name: value for name, value in body.items() if name not in _ENVELOPE and value is not None}
        data = msgspec.json.encode([what, said], order="deterministic")
        return cls(key, hashlib.sha256(data).hexdigest())

    @classmethod
    def from_request(cls, request: Request, what: str, body: Mapping[str, Any]) -> IdempotencyKey | None:
        """Of a request that has the header. Raises: InvalidRequestError."""
        key = request.headers.get(HEADER)
        return cls.create(key, what, body) if key is not None else None

    def claim(self, target: str) -> Claim:
        return Claim(self.key, self.digest, target)

    def resolve(self, claim: Claim) -> str:
        """What the same request made. Raises: IdempotencyConflictError where it was another one."""
        if claim.digest != self.digest:
            raise IdempotencyConflictError(claim)
        return claim.target

    async def find_target(self, store: ConversationStore, owner: str) -> str | None:
        """The id of what this request made before. Raises: IdempotencyConflictError."""
        claim = await store.find_claim(owner, self.key)
        return self.resolve(claim) if claim is not None else None


class KeyLocks:
    """Of requests that come at the same time with the same key all but one wait here."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def get(self, owner: str, once: IdempotencyKey) -> asyncio.Lock:
        lock = self._locks.get((owner, once.key))
        if lock is None:
            lock = self._locks[owner, once.key] = asyncio.Lock()
        return lock
