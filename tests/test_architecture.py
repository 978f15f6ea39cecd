"""The layers are law: who may import whom, read from the syntax trees (lazy and TYPE_CHECKING imports count)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "chatcache"

BASE = {"types", "errors", "config"}

# room -> the rooms it may import besides itself. The expected value; change it only with the design.
ALLOWED: dict[str, set[str]] = {
    "types": {"errors"},
    "errors": set(),
    "config": set(),
    "logs": set(),
    "kv": BASE,
    "sched": BASE | {"kv", "decode"},
    "decode": BASE | {"sched"},
    "engine": BASE | {"kv", "sched", "decode"},
    "text": BASE,
    "model": BASE | {"sched", "builtin"},
    "builtin": set(),
    "chat": BASE | {"engine", "text"},
    "bus": BASE | {"engine", "logs"},
    "gateway": BASE | {"engine", "chat", "text", "logs"},
}
# Of a neighbour named here, only these modules are a seam (plain data and protocols).
SEAMS: dict[tuple[str, str], set[str]] = {
    ("sched", "decode"): {"decode.actions"},
    ("decode", "sched"): {"sched.plan"},
    ("model", "sched"): {"sched.plan"},
    ("model", "builtin"): {"builtin"},
    ("chat", "engine"): {"engine.client"},
    ("gateway", "engine"): {"engine.client", "engine.room"},
}
COMPOSITION = {"__init__", "__main__", "cli", "llm", "compose", "settings", "bench"}
PURE = {"kv", "sched", "decode", "engine"}
HEAVY = {"torch", "triton", "transformers", "starlette", "redis", "uvicorn", "numba", "tokenizers"}
ENGINE_TESTS = {
    "test_bench_bare.py",
    "test_bench_gpu_check.py",
    "test_kernels_triton_engine.py",
    "test_kernels_triton_steps.py",
}
REDIS_ROOMS = {"chat/redis_link.py"}  # the one file of the store that knows redis-py


def _imports(path: Path) -> list[tuple[int, str]]:
    """Every absolute dotted name a file imports, `from a import b` as `a.b`; a relative import stays in its room."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2 or "kernels" in path.parts, f"{path}:{node.lineno}: relative import out of the room"
            if node.level:
                continue
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def violations(path: Path, room: str, imports: list[tuple[int, str]]) -> list[str]:
    """Every import of this file that the table forbids."""
    bad: list[str] = []
    for line, name in imports:
        parts = name.split(".")
        where = f"{path}:{line}: {room} imports {name}"
        if parts[0] == "chatcache" and len(parts) > 1 and room not in COMPOSITION:
            target = parts[1]
            if target == room or target == "__version__":
                continue
            if target not in ALLOWED.get(room, set()):
                bad.append(where)
            seam = SEAMS.get((room, target))
            if seam and not any(".".join(parts[1:]).startswith(allowed) for allowed in seam):
                bad.append(f"{where} (not a seam)")
        if room in PURE and parts[0] in HEAVY:
            bad.append(f"{where} (a pure room)")
        if parts[0] == "redis" and room != "bus" and not any(str(path).endswith(p) for p in REDIS_ROOMS):
            bad.append(f"{where} (redis-py lives in the stores and the bus)")
    return bad


def test_layers_hold() -> None:
    bad: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        bad += violations(path, _room(path), _imports(path))
    assert not bad, "\n".join(bad)


def test_every_room_is_in_the_table() -> None:
    rooms = {_room(path) for path in PACKAGE.rglob("*.py")}
    assert rooms <= set(ALLOWED) | COMPOSITION, rooms - set(ALLOWED) - COMPOSITION


def test_kernels_know_nothing_of_the_package() -> None:
    """Neither do their tests and benchmarks, but for those that run the whole engine over them."""
    kernels = ROOT / "kernels"
    for path in kernels.rglob("*.py"):
        if path.parent == kernels / "bench" / "check" or path.name in ENGINE_TESTS:
            continue
        assert not [name for _, name in _imports(path) if name.split(".")[0] == "chatcache"], path


def test_the_loadtest_speaks_the_wire_only() -> None:
    engine = ROOT / "loadtest" / "peers" / "drivers"  # engines in processes of their own: one of them is ours
    served = {ROOT / "loadtest" / "gateway" / name for name in ("clock.py", "served.py")}  # what is measured there
    for path in set((ROOT / "loadtest").rglob("*.py")) - set(engine.glob("chatcache_*.py")) - served:
        assert not [name for _, name in _imports(path) if name.split(".")[0] == "chatcache"], path


@pytest.mark.parametrize(
    ("room", "name"),
    [
        ("kv", "chatcache.sched.plan"),
        ("kv", "torch"),
        ("engine", "chatcache.model.runner.Runner"),
        ("engine", "numba"),
        ("gateway", "chatcache.kv.pool"),
        ("gateway", "chatcache.engine.engine.Engine"),
        ("decode", "chatcache.sched.scheduler"),
        ("model", "chatcache.engine"),
        ("gateway", "redis.asyncio"),
    ],
)
def test_the_check_can_fail(room: str, name: str) -> None:
    assert violations(Path("planted.py"), room, [(1, name)])
