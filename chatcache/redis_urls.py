"""redis-py clients for the URL of a Redis server, or of the Sentinels that know which server is the primary.

    redis://user:password@host:6379/0                                  rediss:// for TLS
    redis+sentinel://user:password@host:26379,host:26379/service/0     rediss+sentinel:// for TLS

User and password are those of the server. Those of the Sentinels, if they differ from none, are the query fields
`sentinel_username` and `sentinel_password`; other query fields are options of redis-py, such as `ssl_ca_certs`. Every
new connection asks a Sentinel for the primary. After a failover, the connections to the old primary are closed: it may
still answer if only replicas and Sentinels do not reach it.

With `wait_replicas=1` the transactions of `transaction` succeed only when so many replicas have them, too, so that a
failover does not lose them.
"""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as SyncRetry

SENTINEL_PORT = 26379
MAX_WAITED_REPLICAS = 16
WAIT_MS = 300
_SUFFIX = "+sentinel"
_SENTINEL_TIMEOUT_S = 0.3  # of each; the next one is asked then


def open_client(url: str, **options: Any) -> Any:
    """Return an asynchronous client that never repeats a command. Raises: ValueError for an invalid URL."""
    url, _ = _split_wait(url)
    options = {"retry": Retry(NoBackoff(), 0), "protocol": 2, "decode_responses": False, **options}
    if not _names_sentinels(url):
        return redis.asyncio.Redis.from_url(url, **options)
    return _open_primary(redis.asyncio, _PrimaryPool, url, options)


def open_sync_client(url: str, **options: Any) -> Any:
    """Return a client for use without an event loop, as `open_client` does."""
    url, _ = _split_wait(url)
    options = {"retry": SyncRetry(NoBackoff(), 0), "protocol": 2, **options}
    if not _names_sentinels(url):
        return redis.Redis.from_url(url, **options)
    return _open_primary(redis, _SyncPrimaryPool, url, options)


def check_url(url: str) -> None:
    """Check that clients can be made for a URL. Raises: ValueError, whose message does not contain the password."""
    parts = urlsplit(url)
    if not _names_sentinels(url):
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(
                "the port is no number up to 65535; in a user or password, write / ? # @ % as %2F %3F %23 %40 %25"
            ) from None
        if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
            raise ValueError("the database after the host must be a number")
    try:
        open_sync_client(url).connection_pool.make_connection()
    except TypeError as error:  # of a constructor in redis-py
        raise ValueError(f"an option after the ? is unknown: {str(error).rpartition(' ')[2]}") from None


async def close_idle_connections(client: Any) -> None:
    """Let the next connections ask for the primary: the server that refused a write may not be it any more."""
    with contextlib.suppress(redis.RedisError, OSError):  # a connection over TLS may not end in time; it is closed
        await client.connection_pool.disconnect(inuse_connections=False)


def num_waited_replicas(url: str) -> int:
    """Return `wait_replicas` of a URL. Raises: ValueError."""
    return _split_wait(url)[1]


def _split_wait(url: str) -> tuple[str, int]:
    """Return the URL without `wait_replicas`, and its value. Raises: ValueError."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    value = query.pop("wait_replicas", None)
    if value is None:
        return url, 0
    if not value.isascii() or not value.isdecimal() or int(value) > MAX_WAITED_REPLICAS:
        raise ValueError(f"wait_replicas must be between 0 and {MAX_WAITED_REPLICAS}")
    return urlunsplit(parts._replace(query=urlencode(query))), int(value)


def transaction(client: Any, num_replicas: int) -> Any:
    """Return a pipeline of the client whose commands are executed all or not at all.

    Its `execute` raises redis.ResponseError if `num_replicas` replicas have not confirmed them in WAIT_MS; they may
    have been executed then.
    """
    if not num_replicas:
        return client.pipeline(transaction=True)
    return _ReplicatedPipeline(client, num_replicas)


class _ReplicatedPipeline(Pipeline):  # type: ignore[misc]  # redis-py has no types
    def __init__(self, client: Any, num_replicas: int) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, True, None)
        self._num_replicas = num_replicas

    async def _execute_transaction(self, connection: Any, commands: Any, raise_on_error: Any) -> Any:
        """Execute, then WAIT on the same connection: another one could be to a newer primary."""
        result = await super()._execute_transaction(connection, commands, raise_on_error)
        if commands:
            await connection.send_command("WAIT", self._num_replicas, WAIT_MS)
            num_confirmed = int(await connection.read_response())
            if num_confirmed < self._num_replicas:
                raise redis.ResponseError(f"{num_confirmed} of {self._num_replicas} replicas have confirmed a write")
        return result


def server_name(url: str) -> str:
    """Return the part of a URL that names servers, for messages: without user, password and options."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _names_sentinels(url: str) -> bool:
    return urlsplit(url).scheme.endswith(_SUFFIX)


class _PrimaryPool(redis.asyncio.sentinel.SentinelConnectionPool):  # type: ignore[misc]
    """Connections to the primary, which closes those to the Sentinels, too."""

    async def release(self, connection: Any) -> None:
        """Return a connection; close it first if a newer one found another primary meanwhile."""
        if (connection.host, connection.port) != self.master_address:
            await connection.disconnect(nowait=True)  # a server that is cut off does not end a TLS connection
        await super().release(connection)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


class _SyncPrimaryPool(redis.sentinel.SentinelConnectionPool):  # type: ignore[misc]
    """As `_PrimaryPool`."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.close()


def _open_primary(library: Any, pool: Any, url: str, options: dict[str, Any]) -> Any:
    """Return a client of the primary that Sentinels name. Raises: ValueError."""
    parts = urlsplit(url)
    scheme = parts.scheme.removesuffix(_SUFFIX)
    if scheme not in ("redis", "rediss"):
        raise ValueError(f"the scheme {parts.scheme} is none of redis, rediss, redis+sentinel, rediss+sentinel")
    user, at, addresses = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the URL of Sentinels names no service: redis+sentinel://host:26379/service/0")
    if database and not database.isdecimal():
        raise ValueError("the database after the service must be a number")
    query = dict(parse_qsl(parts.query))
    logins = {"username": query.pop("sentinel_username", None), "password": query.pop("sentinel_password", None)}
    plain = urlunsplit((scheme, f"{user}{at}localhost", f"/{database or 0}", urlencode(query), ""))
    given = library.connection.parse_url(plain)
    given.pop("host", None)
    if given.pop("connection_class", None) is not None:  # TLS
        given["ssl"] = True
    tls = {name: value for name, value in given.items() if name.startswith("ssl")}
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _SENTINEL_TIMEOUT_S)
    asked = {**timeouts, **tls, **{name: value for name, value in logins.items() if value is not None}}
    asked |= {"retry": options["retry"], "protocol": 2}
    hosts = [_address(each) for each in addresses.split(",")]
    sentinels = library.sentinel.Sentinel(hosts, sentinel_kwargs=asked)
    return sentinels.master_for(service, connection_pool_class=pool, **options, **given)


def _address(text: str) -> tuple[str, int]:
    """Return host and port. Raises: ValueError."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("the URL of Sentinels has an empty host")
    return parts.hostname, parts.port or SENTINEL_PORT
