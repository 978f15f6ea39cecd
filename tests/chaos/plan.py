"""Plan of a run, drawn from its seed alone: the same seed and duration give the same plan."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

StoreKind = Literal["sqlite", "redis", "sentinel"]

FIRST_S = 3.0
PAUSE_S = (2.0, 6.0)
NUM_CLIENTS = 8

# name -> (relative weight, range of its duration in seconds)
GATEWAY_FAULTS: dict[str, tuple[int, tuple[float, float]]] = {
    "kill_gateway": (4, (0.0, 1.5)),  # until it is started again
    "drain_gateway": (2, (0.0, 1.0)),
    "slow_clients": (2, (1.0, 4.0)),
    "clock": (2, (0.0, 0.0)),
}
ENGINE_FAULTS: dict[str, tuple[int, tuple[float, float]]] = {
    "kill_engine": (4, (0.0, 0.0)),
    "stop_engine": (3, (0.3, 4.0)),
}
WORKER_FAULTS: dict[str, tuple[int, tuple[float, float]]] = {
    "kill_worker": (4, (0.0, 1.5)),
    "stop_worker": (3, (0.3, 6.0)),
    "drain_worker": (2, (0.0, 1.0)),
    "stop_gateway": (3, (0.3, 6.0)),
}
REDIS_FAULTS: dict[str, tuple[int, tuple[float, float]]] = {
    "kill_redis": (3, (0.0, 2.0)),
    "stop_redis": (2, (0.3, 3.0)),
    "proxy_delay": (2, (1.0, 4.0)),
    "proxy_refuse": (2, (0.3, 3.0)),
    "proxy_stall": (2, (0.3, 3.0)),
    "proxy_cut": (3, (0.5, 2.0)),
    "proxy_lose": (2, (0.3, 2.0)),
}
SENTINEL_FAULTS: dict[str, tuple[int, tuple[float, float]]] = {"kill_primary": (2, (6.0, 9.0))}
OTHER_FAULTS: dict[StoreKind, dict[str, tuple[int, tuple[float, float]]]] = {
    "sqlite": {},
    "redis": REDIS_FAULTS,
    "sentinel": SENTINEL_FAULTS,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One step. `target`: of which server. `amount`: size, if any (bytes until a cut, seconds of a jump)."""

    step: int
    at_s: float
    name: str
    target: int
    for_s: float
    amount: float = 0.0

    def __str__(self) -> str:
        target = "" if self.is_of_store else f" of server {self.target}"
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        size = f" ({self.amount:g})" if self.amount else ""
        return f"{self.step:4}  {self.at_s:6.1f} s  {self.name}{target}{lasts}{size}"

    @property
    def is_of_store(self) -> bool:
        return self.name in REDIS_FAULTS or self.name in SENTINEL_FAULTS


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    store: StoreKind
    num_gateways: int
    num_workers: int
    num_clients: int
    faults: tuple[Fault, ...]
    length_s: float

    def up_to(self, num_steps: int | None) -> Plan:
        """Return the plan with the faults before step `num_steps`, and a few seconds to observe their effect."""
        if num_steps is None or num_steps >= len(self.faults):
            return self
        length_s = min(self.length_s, self.faults[num_steps].at_s)
        return dataclasses.replace(self, faults=self.faults[:num_steps], length_s=length_s)


def make_plan(
    seed: int,
    minutes: float,
    store: StoreKind | None = None,
    num_clients: int = NUM_CLIENTS,
    num_workers: int = 0,
) -> Plan:
    """Draw a plan. Without `store`, half of the seeds use Redis, mostly with two gateways; with workers, all do."""
    draw = random.Random(f"chaos/{seed}")
    drawn: StoreKind = draw.choice(["sqlite", "redis"])
    kind = store or ("redis" if num_workers else drawn)
    num_gateways = 2 if num_workers else 1 if kind == "sqlite" else draw.choice([1, 2, 2])
    table = GATEWAY_FAULTS | ENGINE_FAULTS | OTHER_FAULTS[kind]
    table |= WORKER_FAULTS if num_workers else {}
    faults = _faults(random.Random(f"chaos/{seed}/{kind}/faults"), table, num_gateways, num_workers, minutes * 60)
    return Plan(seed, kind, num_gateways, num_workers, num_clients, tuple(faults), minutes * 60)


def _faults(
    draw: random.Random,
    table: Mapping[str, tuple[int, tuple[float, float]]],
    num_gateways: int,
    num_workers: int,
    length_s: float,
) -> Iterator[Fault]:
    names, weights = list(table), [weight for weight, _ in table.values()]
    step, at_s = 0, FIRST_S
    while at_s < length_s:
        (name,) = draw.choices(names, weights)
        is_of_worker = num_workers > 0 and (name in ENGINE_FAULTS or name.endswith("_worker"))
        target = draw.randrange(num_workers if is_of_worker else num_gateways)
        for_s = round(draw.uniform(*table[name][1]), 2)
        amount = {
            "proxy_delay": draw.uniform(0.002, 0.2),
            "proxy_cut": float(draw.randrange(1, 20_000)),
            "clock": draw.choice([-3600.0, 3600.0]),
            "slow_clients": float(draw.randrange(2, 8)),
        }.get(name, 0.0)
        yield Fault(step, round(at_s, 2), name, target, for_s, round(amount, 3))
        step, at_s = step + 1, at_s + draw.uniform(*PAUSE_S)
