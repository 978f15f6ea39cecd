"""The layers are law: who may import whom, read from the syntax trees (lazy and TYPE_CHECKING imports count)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import structure

MAX_LINES = 700
MAX_MODULES = 346
MAX_SINGLE_IMPORTERS = 42  # modules that only one other imports, besides entry points

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "chatcache"

BASE = {"types", "errors", "config", "logs"}

# package -> the packages it may import besides itself. The expected value; change it only with the design.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "logs": set(),
    "types": {"errors"},
    "config": {"errors"},
    "auth": {"errors"},
    "redis_urls": set(),
    "torch_environment": set(),
    "kv_cache": BASE,
    "tokenizer": BASE,
    "scheduler": BASE | {"kv_cache"},
    "decoding": BASE,
    "engine": BASE | {"kv_cache", "scheduler", "decoding"},
    "model": BASE | {"demo_model", "torch_environment"},
    "demo_model": set(),
    "engine_process": BASE | {"engine"},
    "cluster": BASE | {"engine_process", "kv_cache", "redis_urls"},
    "conversations": BASE | {"auth", "engine", "tokenizer"},
    "storage": BASE | {"auth", "conversations", "redis_urls"},
    "transfer": BASE | {"auth", "conversations", "storage", "tokenizer"},
    "gateway": BASE | {"auth", "engine", "conversations", "storage", "transfer", "tokenizer"},
}
# Of a package named here, only these modules may be imported (plain data and protocols).
SEAMS: dict[tuple[str, str], set[str]] = {
    ("model", "demo_model"): {"demo_model"},
    ("cluster", "kv_cache"): {"kv_cache.page_hash"},
    ("conversations", "engine"): {"engine.protocols"},
    ("gateway", "engine"): {"engine.protocols"},
}
COMPOSITION = {"__init__", "__main__", "cli", "llm", "factory", "bench"}
PURE = {"kv_cache", "scheduler", "decoding", "engine"}
PURE_MODULES = {"cluster/placement.py", "cluster/routing.py"}  # plus: no event loop, no clock
HEAVY = {"torch", "triton", "transformers", "starlette", "redis", "uvicorn", "numba", "tokenizers"}
ENGINE_TESTS = {
    "test_bench_bare.py",
    "test_bench_gpu_check.py",
    "test_triton_engine.py",
}
REDIS_MODULES = {"redis_urls.py", "storage/redis_client.py", "cluster/bus.py"}  # the files that know redis-py


def _imports(path: Path) -> list[tuple[int, str]]:
    """Every absolute dotted name a file imports, `from a import b` as `a.b`; a relative import stays in its package."""
    found: list[tuple[int, str]] = []
    for node in structure.import_statements(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        else:
            assert node.level < 2 or "kernels" in path.parts, f"{path}:{node.lineno}: relative import"
            if node.level:
                continue
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def _package(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def violations(path: Path, package: str, imports: list[tuple[int, str]]) -> list[str]:
    """Every import of this file that the table forbids."""
    bad: list[str] = []
    for line, name in imports:
        parts = name.split(".")
        where = f"{path}:{line}: {package} imports {name}"
        if parts[0] == "chatcache" and len(parts) > 1 and package not in COMPOSITION:
            target = parts[1]
            if target == package or target == "__version__":
                continue
            if target not in ALLOWED.get(package, set()):
                bad.append(where)
            seam = SEAMS.get((package, target))
            if seam and not any(".".join(parts[1:]).startswith(allowed) for allowed in seam):
                bad.append(f"{where} (not a seam)")
        if package in PURE and parts[0] in HEAVY:
            bad.append(f"{where} (a pure package)")
        if any(str(path).endswith(p) for p in PURE_MODULES) and parts[0] in HEAVY | {"asyncio", "anyio", "time"}:
            bad.append(f"{where} (a pure module)")
        if (
            parts[0] == "redis"
            and package != "engine_process"
            and not any(str(path).endswith(p) for p in REDIS_MODULES)
        ):
            bad.append(f"{where} (redis-py lives in the stores and the bus)")
    return bad


def test_layers_hold() -> None:
    bad: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        bad += violations(path, _package(path), _imports(path))
    assert not bad, "\n".join(bad)


def test_every_package_is_in_the_table() -> None:
    packages = {_package(path) for path in PACKAGE.rglob("*.py")}
    assert packages <= set(ALLOWED) | COMPOSITION, packages - set(ALLOWED) - COMPOSITION


def test_kernels_do_not_import_the_package() -> None:
    """Benchmarks and the tests that run the whole engine on the kernels are the exceptions."""
    kernels = ROOT / "kernels"
    for path in kernels.rglob("*.py"):
        if path.is_relative_to(kernels / "bench") or path.name in ENGINE_TESTS:
            continue
        assert not [name for _, name in _imports(path) if name.split(".")[0] == "chatcache"], path


def test_loadtest_imports_only_report_and_contention() -> None:
    """The load test measures any server; measured processes of our own and the studies are the exceptions."""
    allowed = ("chatcache.bench.report.", "chatcache.bench.contention.")
    drivers = ROOT / "loadtest" / "peers" / "drivers"
    measured = {ROOT / "loadtest" / name for name in ("bus.py", "gateway/clock_engine.py", "gateway/servers.py")}
    simulated = {path for name in ("studies", "scale") for path in (ROOT / "loadtest" / name).glob("*.py")}
    for path in set((ROOT / "loadtest").rglob("*.py")) - set(drivers.glob("chatcache_*.py")) - measured - simulated:
        names = [name for _, name in _imports(path) if name.split(".")[0] == "chatcache"]
        assert all(name.startswith(allowed) for name in names), path


def test_routing_cannot_import_an_event_loop() -> None:
    for name in ("asyncio", "redis.asyncio", "time.time"):
        assert violations(PACKAGE / "cluster" / "routing.py", "cluster", [(1, name)])


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("kv_cache", "chatcache.scheduler.scheduler"),
        ("kv_cache", "torch"),
        ("engine", "chatcache.model.runner.Runner"),
        ("engine", "numba"),
        ("gateway", "chatcache.kv_cache.pool"),
        ("gateway", "chatcache.engine.engine.Engine"),
        ("decoding", "chatcache.scheduler.scheduler"),
        ("model", "chatcache.engine"),
        ("gateway", "redis.asyncio"),
    ],
)
def test_the_check_can_fail(package: str, name: str) -> None:
    assert violations(Path("planted.py"), package, [(1, name)])


def test_no_import_cycle_between_modules() -> None:
    assert structure.cycles(structure.import_graph()) == []


def test_no_import_cycle_between_packages() -> None:
    assert structure.cycles(structure.by_package(structure.import_graph())) == []


def test_a_cycle_is_found() -> None:
    assert structure.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_module_is_longer_than_the_limit() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in structure.modules().items()}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


def test_number_of_modules_is_bounded() -> None:
    assert len(structure.modules()) <= MAX_MODULES


def test_few_modules_have_a_single_importer() -> None:
    importers = structure.import_graph() | structure.imported_by_programs()
    single = [name for name in structure.single_importers(importers) if not structure.is_registered(importers, name)]
    assert len(single) <= MAX_SINGLE_IMPORTERS, single
