"""Injects the faults of a plan at their times and removes them afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable

from tests.chaos.client import Client
from tests.chaos.history import History
from tests.chaos.plan import ENGINE_FAULTS, Fault
from tests.chaos.processes import Rig, Server
from tests.support.redis_servers import until

DRAIN_GRACE_S = 30.0  # the server's own limit is 20 s
TINY_BUFFER_BYTES = 4096


class FaultInjector:
    """Injects the faults of a plan. `problems`: unexpected results, for example an exit status."""

    def __init__(self, rig: Rig, history: History, stallers: Client) -> None:
        self.problems: list[str] = []
        self._rig = rig
        self._history = history
        self._stallers = stallers
        self._actions: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill_gateway": self._kill,
            "kill_worker": self._kill,
            "stop_gateway": self._stop,
            "stop_worker": self._stop,
            "drain_gateway": self._drain,
            "drain_worker": self._drain,
            "kill_engine": self._kill_engine,
            "stop_engine": self._stop_engine,
            "slow_clients": self._slow_clients,
            "clock": self._clock,
            "kill_redis": self._kill_redis,
            "kill_primary": self._kill_primary,
            "stop_redis": self._stop_redis,
            "proxy_delay": self._proxy,
            "proxy_refuse": self._proxy,
            "proxy_stall": self._proxy,
            "proxy_cut": self._proxy,
            "proxy_lose": self._proxy,
        }

    async def inject(self, fault: Fault) -> None:
        """Inject one fault and remove it; faults of the same process run one after another."""
        lock = self._rig.redis_lock if fault.is_of_store else self._server(fault).lock
        async with lock if fault.name != "slow_clients" else contextlib.nullcontext():
            print(f"        {self._history.now_s:7.1f} s  {fault}", flush=True)
            self._note(fault, "begin")
            await self._actions[fault.name](fault)
            self._note(fault, "end")

    def _note(self, fault: Fault, phase: str) -> None:
        target = fault.target
        self._history.note("fault", step=fault.step, name=fault.name, phase=phase, target=target)

    def _server(self, fault: Fault) -> Server:
        """Return the gateway or worker of a fault."""
        is_of_worker = fault.name.endswith("_worker") or (fault.name in ENGINE_FAULTS and self._rig.workers)
        return (self._rig.workers if is_of_worker else self._rig.gateways)[fault.target]

    def _running(self, fault: Fault) -> Server:
        server = self._server(fault)
        self.restart_if_ended(server)
        return server

    def restart_if_ended(self, server: Server) -> None:
        """Report a process that ended without a signal, and start it again."""
        status = server.process.poll() if server.process is not None else 0
        if server.is_meant_to_run and status is not None:
            self.problems.append(f"{server.name} ended by itself ({status}):\n{server.last_output()}")
            server.start()

    async def _kill(self, fault: Fault) -> None:
        server = self._running(fault)
        server.kill()
        await asyncio.sleep(fault.for_s)
        server.start()

    async def _stop(self, fault: Fault) -> None:
        server = self._running(fault)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.for_s)
        server.signal(signal.SIGCONT)

    async def _kill_engine(self, fault: Fault) -> None:
        engine = self._running(fault).engine()
        if engine is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    async def _stop_engine(self, fault: Fault) -> None:
        engine = self._running(fault).engine()
        if engine is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGSTOP)
            await asyncio.sleep(fault.for_s)
            os.kill(engine, signal.SIGCONT)

    async def _drain(self, fault: Fault) -> None:
        server = self._running(fault)
        is_ready = await server.is_ready()
        status = await server.end(DRAIN_GRACE_S)
        if status != 0 and is_ready:  # a starting process may receive SIGTERM before it handles the signal
            self.problems.append(f"{server.name} drained with {status}:\n{server.last_output()}")
        await asyncio.sleep(fault.for_s)
        server.start()

    async def _slow_clients(self, fault: Fault) -> None:
        """Open streams that are never read."""
        gateway, open_ = self._rig.gateways[fault.target], []
        for _ in range(int(fault.amount)):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BUFFER_BYTES)
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", gateway.port))
                await asyncio.get_running_loop().sock_sendall(sock, self._stallers.as_request(gateway.port))
            open_.append(sock)
        await asyncio.sleep(fault.for_s)
        for sock in open_:
            sock.close()

    async def _clock(self, fault: Fault) -> None:
        """Shift the wall clock by an hour; the next jump shifts it back."""
        gateway = self._rig.gateways[fault.target]
        gateway.set_clock(int(fault.amount) if gateway.clock.read_text() == "+0" else 0)

    async def _kill_redis(self, fault: Fault) -> None:
        redis = self._rig.redis
        assert redis is not None
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(redis.start)

    async def _kill_primary(self, fault: Fault) -> None:
        """Kill the server that the Sentinels name; it becomes a replica when it is started again.

        All Sentinels know the new primary by then. Until they do, a server that is back at once would get writes that
        are lost. The servers were in sync before: with `wait_replicas=1` one failure at a time loses nothing.
        """
        group = self._rig.group
        assert group is not None

        async def is_in_sync() -> bool:
            return await asyncio.to_thread(group.is_in_sync)

        await until(is_in_sync, "both replicas in sync")
        primary = await asyncio.to_thread(group.primary)
        await asyncio.to_thread(primary.kill)
        await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(primary.start_as_primary)

    async def _stop_redis(self, fault: Fault) -> None:
        redis = self._rig.redis
        assert redis is not None
        redis.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.for_s)
        redis.signal(signal.SIGCONT)

    async def _proxy(self, fault: Fault) -> None:
        proxy = self._rig.proxy
        assert proxy is not None
        if fault.name == "proxy_delay":
            proxy.delay_s = fault.amount
        elif fault.name == "proxy_refuse":
            await proxy.refuse()
        elif fault.name == "proxy_stall":
            proxy.stall()
        elif fault.name == "proxy_cut":
            proxy.cut(int(fault.amount))
        else:
            proxy.lose()
        await asyncio.sleep(fault.for_s)
        await proxy.heal()
