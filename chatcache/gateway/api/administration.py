"""GET /v1/admin: keys, conversation counts, pages by tenant and workers, for administrators. No content."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from chatcache.auth import KeyRecord, namespace_of, utc_day
from chatcache.conversations.store import ConversationStore
from chatcache.errors import ChatcacheError
from chatcache.gateway.api.conversations import store_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.schemas.server import AdminKey, AdminOverview, AdminServer, AdminTenant, AdminUser, AdminWorker

MAX_COUNTED = 10_000  # conversations of one owner
_CHUNK = 1_000


async def overview(request: Request) -> Response:
    """GET /v1/admin: the state of the server in counts.

    Raises: see `store_of`; StoreUnavailableError.
    """
    gateway, store = gateway_of(request), store_of(request)
    records = await store.keys.list()
    used = await store.keys.usage(utc_day(time.time()))
    # An open server has one owner, "".
    owners = sorted({*gateway.key_cache.static_owners, *(record.owner for record in records)} or {""})
    users = [AdminUser(namespace_of(owner), owner.partition("/")[2], await _count(store, owner)) for owner in owners]
    body = AdminOverview(
        object="admin.overview",
        keys=[_key(record, used.get(record.id, 0)) for record in records],
        users=users,
        tenants=await _tenants(gateway, records, users),
        server=await _server(gateway),
    )
    return json_response(body, headers={"cache-control": "no-store"})


async def _count(store: ConversationStore, owner: str) -> int:
    """Return the number of the owner's conversations, at most `MAX_COUNTED`."""
    count, after = 0, None
    while count < MAX_COUNTED:
        ids = await store.list_ids(owner, _CHUNK, after)
        count += len(ids)
        if len(ids) < _CHUNK:
            break
        after = ids[-1]
    return min(count, MAX_COUNTED)


async def _tenants(gateway: Gateway, records: Sequence[KeyRecord], users: Sequence[AdminUser]) -> list[AdminTenant]:
    conversations: Counter[str] = Counter()
    for user in users:
        conversations[user.tenant] += user.conversations
    active = Counter(record.tenant for record in records if record.revoked_at is None)
    pages: dict[str, float] = {}
    try:
        pages = (await gateway.engine.page_accounts()).namespaces
    except ChatcacheError:
        pass  # the engine is not running, and holds no pages
    names = sorted({*conversations, *pages})
    return [AdminTenant(name, active[name], conversations[name], round(pages.get(name, 0.0), 3)) for name in names]


async def _server(gateway: Gateway) -> AdminServer:
    health = await gateway.health()
    return AdminServer(
        ready=health.ready,
        model=gateway.model_name,
        version=gateway.version,
        uptime_s=max(0, int(time.time()) - gateway.started_at),
        num_running=health.num_running,
        num_waiting=health.num_waiting,
        num_pages=health.num_pages,
        num_pages_in_use=health.num_pages_in_use,
        num_pages_idle=health.num_pages_idle,
        num_prompt_tokens=health.num_prompt_tokens,
        num_cached_tokens=health.num_cached_tokens,
        num_output_tokens=health.num_output_tokens,
        num_preemptions=health.num_preemptions,
        num_evictions=health.num_evictions,
        num_restarts=health.num_restarts,
        workers=[
            AdminWorker(each.name, sum(each.requests.values()), each.num_prompt_tokens, each.num_cached_tokens)
            for each in health.workers
        ],
    )


def _key(record: KeyRecord, tokens_today: int) -> AdminKey:
    return AdminKey(
        id=record.id,
        tenant=record.tenant,
        user=record.user,
        name=record.name,
        is_admin=record.is_admin,
        requests_per_minute=record.requests_per_minute,
        tokens_per_minute=record.tokens_per_minute,
        max_concurrent=record.max_concurrent,
        tokens_per_day=record.tokens_per_day,
        tokens_today=tokens_today,
        created_at=int(record.created_at),
        revoked_at=None if record.revoked_at is None else int(record.revoked_at),
    )
