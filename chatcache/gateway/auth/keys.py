"""In-memory cache of the API keys, polled from the store.

Keys have two sources: `--api-key`, fixed while the server runs, and the store, which `chatcache keys` changes at any
time. No request is authenticated before the stored keys were read once, so a server that has keys is never open.
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
_UNKNOWN_DIGEST = bytes(32)
_KEY_REQUIRED = "a valid API key is required: Authorization: Bearer KEY"


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    principal: Principal
    is_revoked: bool = False


class ApiKeyCache:
    """Maps API keys and session cookies to principals, and reports revoked keys to watchers.

    Belongs to one event loop.
    """

    def __init__(self, api_keys: Sequence[str] = ()) -> None:
        digests = (key_digest(key) for key in api_keys)
        self._static_keys = {key.principal.key_id: key for key in map(_static_key, digests)}
        self._stored_keys: Mapping[str, _Key] = {}
        self._revoked: set[str] = set()
        self._store: KeyStore | None = None
        self._version: int | None = None
        self._refresh_lock = asyncio.Lock()
        self._poll_task: asyncio.Task[None] | None = None
        self._watchers: dict[str, dict[object, Callable[[], None]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether no API key exists, so that every request is accepted without one."""
        return self.is_loaded and not self._static_keys and not self._stored_keys

    @property
    def is_loaded(self) -> bool:
        """Whether the stored keys were read at least once.

        Until then the server does not know whether keys are required.
        """
        return self._version is not None

    def check_loaded(self) -> None:
        """Check that the stored keys were read. Raises: StoreUnavailableError."""
        if not self.is_loaded:
            raise StoreUnavailableError("the API keys cannot be read now")

    @property
    def static_owners(self) -> frozenset[str]:
        """Owners of the keys given with `--api-key`."""
        return frozenset(key.principal.owner for key in self._static_keys.values())

    @property
    def num_keys(self) -> int:
        """Number of active keys."""
        return len(self._static_keys) + sum(not key.is_revoked for key in self._stored_keys.values())

    async def open(self, store: KeyStore) -> None:
        """Read the stored keys and start to poll them.

        If the store does not answer, no request is authenticated until it does.
        """
        self._store = store
        await self.refresh()
        self._poll_task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.gather(self._poll_task, return_exceptions=True)

    async def refresh(self) -> None:
        """Read the stored keys if they changed. Keep the cached ones if the store does not answer."""
        store = self._store
        if store is None:
            return
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                if await store.version() != self._version:
                    async with self._refresh_lock:
                        # Read the version first: the next refresh then sees a change made in between.
                        version, records = await store.version(), await store.list()
                        self._apply(version, records)

    async def recheck(self, principal: Principal) -> None:
        """Refresh the keys and check the principal again.

        Raises: AuthenticationError if its key was revoked or its session has expired.
        """
        if principal.key_id and principal.key_id not in self._static_keys:
            await self.refresh()
        self.check(principal)

    def check(self, principal: Principal) -> None:
        """Check the principal against the cached keys.

        Raises: AuthenticationError if its key was revoked or its session has expired.
        """
        if not self.is_valid(principal):
            raise key_revoked_error() if principal.key_id else AuthenticationError(_KEY_REQUIRED)
        if self.expires_in_s(principal) <= 0:
            raise session_expired_error()

    def expires_in_s(self, principal: Principal) -> float:
        """Return the time until the session expires; infinity for an API key."""
        return math.inf if principal.expires_at is None else principal.expires_at - time.time()

    def is_valid(self, principal: Principal) -> bool:
        """Whether the principal's key is active; without a key, whether the server is open."""
        if not principal.key_id:
            return self.is_open
        key = self._key(principal.key_id)
        return key is not None and not key.is_revoked

    def authenticate_key(self, offered: str) -> Principal:
        """Return the principal of an API key.

        Raises: AuthenticationError; StoreUnavailableError for an unknown key before the stored keys were read.
        """
        digest, found = key_digest(offered), None
        # Compare with every static key, so that the time taken does not depend on which one matches.
        for key in self._static_keys.values():
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            key_id = key_id_of(offered)  # the key id is public; the rest of the key is secret
            stored = self._stored_keys.get(key_id) if key_id is not None else None
            if hmac.compare_digest(digest, stored.digest if stored is not None else _UNKNOWN_DIGEST):
                found = stored
        return self._check_active(found)

    def authenticate_session(self, session: Session) -> Principal:
        """Return the principal of a session cookie.

        Raises: AuthenticationError; StoreUnavailableError before the stored keys were read.
        """
        key = self._key(session.key_id)
        digest = key.digest if key is not None else _UNKNOWN_DIGEST
        expected = session_signature(session.key_id, session.expires_at, digest)
        is_right = hmac.compare_digest(expected, session.signature)
        principal = replace(self._check_active(key if is_right else None), expires_at=session.expires_at)
        self.check(principal)
        return principal

    def authenticate_without_key(self) -> Principal:
        """Return the principal of a request without a key, if the server is open.

        Raises: AuthenticationError; StoreUnavailableError before the stored keys were read.
        """
        return OPEN_SERVER_PRINCIPAL if self.is_open else self._check_active(None)

    def create_session(self, principal: Principal) -> tuple[str, int]:
        """Return the value of a new session cookie and when it expires (seconds since 1970).

        Raises: AuthenticationError.
        """
        key = self._key(principal.key_id)
        if key is None or key.is_revoked:
            raise AuthenticationError(_KEY_REQUIRED)
        expires_at = int(time.time()) + SESSION_LIFETIME_S
        return session_cookie_value(principal.key_id, expires_at, key.digest), expires_at

    @contextmanager
    def watch_revocation(self, principal: Principal, on_revoked: Callable[[], None]) -> Iterator[None]:
        """Call `on_revoked` when the principal's key is revoked inside the block. It must not block."""
        watchers, mark = self._watchers.setdefault(principal.key_id, {}), object()
        watchers[mark] = on_revoked
        try:
            yield
        finally:
            watchers.pop(mark, None)
            if not watchers and self._watchers.get(principal.key_id) is watchers:
                del self._watchers[principal.key_id]

    def _key(self, key_id: str) -> _Key | None:
        return self._static_keys.get(key_id) or self._stored_keys.get(key_id)

    def _check_active(self, key: _Key | None) -> Principal:
        if key is not None and not key.is_revoked:
            return key.principal
        self.check_loaded()
        raise AuthenticationError(_KEY_REQUIRED) if key is None else key_revoked_error()

    def _apply(self, version: int, records: Sequence[KeyRecord]) -> None:
        self._revoked |= {record.id for record in records if record.revoked_at is not None}
        # A revocation is permanent: a Redis that lost its last writes, or a promoted replica, may not have it.
        found = {record.id: _stored_key(record, is_revoked=record.id in self._revoked) for record in records}
        lost = {key_id: key for key_id, key in self._stored_keys.items() if key_id not in found}
        if lost:  # a store that loses keys must not open the server
            log.warning("%d stored API keys have disappeared; treating them as revoked", len(lost))
        self._stored_keys = found | {
            key_id: _Key(key.digest, key.principal, is_revoked=True) for key_id, key in lost.items()
        }
        self._version = version
        for key_id in [name for name in self._watchers if not self.is_valid(Principal(name, "", ""))]:
            for on_revoked in list(self._watchers[key_id].values()):
                on_revoked()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S if self.is_loaded else FIRST_POLL_S)
            try:
                await self.refresh()
            except Exception:
                log.exception("could not read the API keys")


def _static_key(digest: bytes) -> _Key:
    name = digest.hex()[:32]
    return _Key(digest, Principal(name, name, name, is_admin=True))


def _stored_key(record: KeyRecord, *, is_revoked: bool) -> _Key:
    limits = KeyLimits(
        record.requests_per_minute, record.tokens_per_minute, record.max_concurrent, record.tokens_per_day
    )
    principal = Principal(record.id, record.tenant, record.owner, is_admin=record.is_admin, limits=limits)
    return _Key(record.digest, principal, is_revoked=is_revoked)
