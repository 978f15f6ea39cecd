"""The keys that open this server, as of at most a moment ago, and who must be told when one no longer does.

Keys come from two places: `--api-key`, for as long as the server runs, and the store, where `chatcache keys` changes
them while it does. Nobody is let in before the stored ones were read once: a server that has keys is never open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from chatcache.auth import KeyRecord, KeyStore, key_digest, key_id_of
from chatcache.conversations.store import StoreUnavailableError
from chatcache.gateway.auth.principal import (
    OPEN_SERVER_PRINCIPAL,
    SESSION_LIFETIME_S,
    KeyLimits,
    Principal,
    Session,
    session_cookie_value,
    session_signature,
)
from chatcache.gateway.errors import AuthenticationError, key_revoked_error, session_expired_error

log = logging.getLogger(__name__)

POLL_S = 2.0
FIRST_POLL_S = 0.2  # until the stored keys were read once
REFRESH_TIMEOUT_S = 5.0
_NOBODY = bytes(32)
_WANTED = "a valid API key is required: Authorization: Bearer KEY"


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    principal: Principal
    is_revoked: bool = False


class ApiKeyCache:
    """Who a key or a session is of. Belongs to one event loop."""

    def __init__(self, api_keys: Sequence[str] = ()) -> None:
        given = (key_digest(key) for key in api_keys)
        self._given = {key.principal.key_id: key for key in map(_given_key, given)}
        self._stored: Mapping[str, _Key] = {}
        self._revoked: set[str] = set()
        self._store: KeyStore | None = None
        self._version: int | None = None
        self._reading = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None
        self._watchers: dict[str, dict[object, Callable[[], None]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in, and so nobody is a tenant."""
        return self.is_loaded and not self._given and not self._stored

    @property
    def is_loaded(self) -> bool:
        """Whether the stored keys were read once: before that nobody can say whether keys are needed, or which."""
        return self._version is not None

    def check_loaded(self) -> None:
        """Raises: StoreUnavailableError unless `is_known`."""
        if not self.is_loaded:
            raise StoreUnavailableError("the API keys cannot be read now")

    @property
    def num_keys(self) -> int:
        """How many let somebody in."""
        return len(self._given) + sum(not key.is_revoked for key in self._stored.values())

    async def open(self, store: KeyStore) -> None:
        """Read the stored keys, and again whenever they change. Without a store that answers, nobody is let in yet."""
        self._store = store
        await self.refresh()
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    async def refresh(self) -> None:
        """Take note of what has changed in the store; nothing is known anew while it does not answer."""
        store = self._store
        if store is None:
            return
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                if await store.version() != self._version:
                    async with self._reading:
                        # The number first: of what changes in between, the next look hears.
                        version, records = await store.version(), await store.list()
                        self._take(version, records)

    async def recheck(self, principal: Principal) -> None:
        """Look once more where it may have changed. Raises: AuthenticationError for one that is let in no more."""
        if principal.key_id and principal.key_id not in self._given:
            await self.refresh()
        self.check(principal)

    def check(self, principal: Principal) -> None:
        """Raises: AuthenticationError for one that is let in no more."""
        if not self.is_valid(principal):
            raise key_revoked_error() if principal.key_id else AuthenticationError(_WANTED)
        if self.expires_in_s(principal) <= 0:
            raise session_expired_error()

    def expires_in_s(self, principal: Principal) -> float:
        """How long a session has still; infinite for a key."""
        return math.inf if principal.expires_at is None else principal.expires_at - time.time()

    def is_valid(self, principal: Principal) -> bool:
        if not principal.key_id:
            return self.is_open
        key = self._key(principal.key_id)
        return key is not None and not key.is_revoked

    def authenticate_key(self, offered: str) -> Principal:
        """Raises: AuthenticationError; StoreUnavailableError for a stored key while none could be read."""
        digest, found = key_digest(offered), None
        # Each is compared, whichever matches: the time taken tells nothing.
        for key in self._given.values():
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            key_id = key_id_of(offered)  # no secret: the rest of the key is
            stored = self._stored.get(key_id) if key_id is not None else None
            if hmac.compare_digest(digest, stored.digest if stored is not None else _NOBODY):
                found = stored
        return self._admitted(found)

    def authenticate_session(self, session: Session) -> Principal:
        """Raises: AuthenticationError; StoreUnavailableError as `of_key`."""
        key = self._key(session.key_id)
        right = session_signature(session.key_id, session.expires_at, key.digest if key is not None else _NOBODY)
        is_right = hmac.compare_digest(right, session.signature)
        principal = replace(self._admitted(key if is_right else None), expires_at=session.expires_at)
        self.check(principal)
        return principal

    def authenticate_without_key(self) -> Principal:
        """Who comes without a key.

        Raises: AuthenticationError; StoreUnavailableError while nobody can say if keys are needed.
        """
        return OPEN_SERVER_PRINCIPAL if self.is_open else self._admitted(None)

    def create_session(self, principal: Principal) -> tuple[str, int]:
        """The value of a new cookie, and until when (since 1970) it is good. Raises: AuthenticationError."""
        key = self._key(principal.key_id)
        if key is None or key.is_revoked:
            raise AuthenticationError(_WANTED)
        expires_at = int(time.time()) + SESSION_LIFETIME_S
        return session_cookie_value(principal.key_id, expires_at, key.digest), expires_at

    @contextmanager
    def notify_revoked(self, principal: Principal, tell: Callable[[], None]) -> Iterator[None]:
        """Call `tell`, which must not wait, once the principal is let in no more."""
        watchers, mark = self._watchers.setdefault(principal.key_id, {}), object()
        watchers[mark] = tell
        try:
            yield
        finally:
            watchers.pop(mark, None)
            if not watchers and self._watchers.get(principal.key_id) is watchers:
                del self._watchers[principal.key_id]

    def _key(self, key_id: str) -> _Key | None:
        return self._given.get(key_id) or self._stored.get(key_id)

    def _admitted(self, key: _Key | None) -> Principal:
        if key is not None and not key.is_revoked:
            return key.principal
        self.check_loaded()
        raise AuthenticationError(_WANTED) if key is None else key_revoked_error()

    def _take(self, version: int, records: Sequence[KeyRecord]) -> None:
        self._revoked |= {record.id for record in records if record.revoked_at is not None}
        # For ever: a Redis that lost its last writes, or the replica that took its place, may say otherwise.
        found = {record.id: _stored_key(record, is_revoked=record.id in self._revoked) for record in records}
        lost = {key_id: key for key_id, key in self._stored.items() if key_id not in found}
        if lost:  # a store that forgets must not open the server
            log.warning("%d of the stored API keys are gone: they are taken as revoked", len(lost))
        self._stored = found | {
            key_id: _Key(key.digest, key.principal, is_revoked=True) for key_id, key in lost.items()
        }
        self._version = version
        for key_id in [name for name in self._watchers if not self.is_valid(Principal(name, "", ""))]:
            for tell in list(self._watchers[key_id].values()):
                tell()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S if self.is_loaded else FIRST_POLL_S)
            try:
                await self.refresh()
            except Exception:
                log.exception("the API keys could not be read")


def _given_key(digest: bytes) -> _Key:
    name = digest.hex()[:32]
    return _Key(digest, Principal(name, name, name, is_admin=True))


def _stored_key(record: KeyRecord, *, is_revoked: bool) -> _Key:
    limits = KeyLimits(
        record.requests_per_minute, record.tokens_per_minute, record.max_concurrent, record.tokens_per_day
    )
    principal = Principal(record.id, record.tenant, record.owner, is_admin=record.is_admin, limits=limits)
    return _Key(record.digest, principal, is_revoked=is_revoked)
