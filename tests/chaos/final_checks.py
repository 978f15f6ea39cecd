"""Final checks after the last fault: gateways become idle, release resources, and return all stored data."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

from tests.chaos.event_sources import Lost
from tests.chaos.fault_injector import DRAIN_GRACE_S
from tests.chaos.history import History
from tests.chaos.http_client import Exchange, ask
from tests.chaos.processes import Gateway, Rig

REST_TIMEOUT_S = 60.0
POLL_S = 0.1
MOST_MORE_FDS = 96  # open connections to Redis: 64 at most, and those of the command line
GAUGES = {
    "chatcache_requests_running": "requests are running",
    "chatcache_requests_waiting": "requests are waiting",
    "chatcache_ws_connections": "sockets are open",
    "chatcache_broken_invariants_total": "invariants are broken",
}


async def epilogue(rig: Rig, history: History) -> None:
    """Record what is not idle, and everything stored, as a newly started gateway returns it."""
    for gateway in rig.gateways:
        problems = await rest(gateway)
        history.note("ledger", gateway=gateway.number, problems=problems)
    for gateway in rig.gateways:  # data that is only in their memory does not count
        gateway.kill()
    reader = rig.gateways[0]
    reader.start()
    await reader.wait_ready()
    await note_stored(reader.port, history)
    status = await reader.end(DRAIN_GRACE_S)
    last = [] if status == 0 else [f"the last gateway exited with {status}:\n{reader.last_output()}"]
    for worker in rig.workers:
        if (status := await worker.end(DRAIN_GRACE_S)) != 0:
            last.append(f"{worker.name} exited with {status}:\n{worker.last_output()}")
    if rig.is_any_engine_left():
        last.append("an engine outlived its gateway or worker")
    if rig.db.exists():
        last += integrity(rig.db)
    history.note("ledger", gateway=reader.number, problems=last)


async def rest(gateway: Gateway, timeout_s: float = REST_TIMEOUT_S) -> list[str]:
    """Wait until a gateway is idle; return what is not idle after the timeout."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            await gateway.wait_ready()
            problems = await unrest(gateway)
        except Lost as lost:
            problems = [f"no answer: {type(lost).__name__} {lost}"]
        if not problems or asyncio.get_running_loop().time() > deadline_s:
            return problems
        await asyncio.sleep(POLL_S)


async def unrest(gateway: Gateway) -> list[str]:
    """Return what is not idle at the moment."""
    problems = []
    ready = (await ask(gateway.port, "GET", "/readyz")).body
    problems += [
        f"{name} is {ready[name]}" for name in ("num_running", "num_waiting", "kv_pages_in_use") if ready[name]
    ]
    cells = (await ask(gateway.port, "GET", "/v1/cache/map")).body["cells"]
    held = len(cells) - cells.count("f") - cells.count("i")
    if held:
        problems.append(f"{held} pages are neither free nor cached: {cells}")
    accounts = (await ask(gateway.port, "GET", "/v1/cache/accounts")).body
    pool: dict[str, Any] = accounts["pool"]
    if pool["active"] or pool["shared"] or pool["cached"] + pool["free"] != ready["kv_pages"]:
        problems.append(f"page counts do not add up: {pool}, {ready['kv_pages']} pages")
    text = await _metrics(gateway.port)
    problems += [f"{int(value)} {GAUGES[name]}" for name in GAUGES if (value := _value(text, name))]
    num_clients, num_fds = fds(gateway)
    if num_clients:
        problems.append(f"{num_clients} connections of clients are open")
    if num_fds > gateway.num_fds + MOST_MORE_FDS:
        problems.append(f"{num_fds} files are open, {gateway.num_fds} at the start")
    return problems


def fds(gateway: Gateway) -> tuple[int, int]:
    """Return the number of client connections of a gateway, and of all its open files."""
    links = [_target(path) for path in Path(f"/proc/{gateway.pid}/fd").iterdir()]
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{gateway.pid}/net/tcp").read_text().splitlines()[1:]]
    local = f":{gateway.port:04X}"
    own = [row for row in rows if row[9] in mine and row[1].endswith(local) and row[3] != "0A"]  # 0A: LISTEN
    return len(own), len(links)


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def integrity(db: Path) -> list[str]:
    """Return the errors of SQLite's integrity checks."""
    connection = sqlite3.connect(db)
    try:
        problems = [row[0] for row in connection.execute("PRAGMA integrity_check")]
        problems += [f"foreign key {row}" for row in connection.execute("PRAGMA foreign_key_check")]
    finally:
        connection.close()
    return [f"database: {each}" for each in problems if each != "ok"]


async def _metrics(port: int) -> str:
    exchange = await Exchange.begin(port, "GET", "/metrics")
    return await exchange.text()


def _value(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M))


async def note_stored(port: int, history: History) -> None:
    """Record every conversation, with every message of every branch."""
    after = ""
    while True:
        page = (await ask(port, "GET", f"/v1/conversations?limit=100{after}")).body
        for head in page["data"]:
            path = f"/v1/conversations/{head['id']}/items?branches=all"
            items = (await ask(port, "GET", path)).body["data"]
            history.note("stored", conversation=head["id"], items=[_item(each) for each in items])
        if not page["has_more"]:
            return
        after = f"&after={page['next']}"


def _item(item: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "parent_id", "role", "response_id", "index", "finish_reason", "status")
    return {name: item.get(name) for name in names} | {"text": item["content"][0]["text"]}
