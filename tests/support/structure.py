"""Print the size of the modules and their import graph: `python -m tests.support.structure`."""

from __future__ import annotations

import ast
import functools
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES = {"chatcache": ROOT / "chatcache", "chatcache_kernels": ROOT / "kernels" / "chatcache_kernels"}
PROGRAMS = (ROOT / "kernels" / "bench", ROOT / "loadtest")  # use the packages; their modules are not counted
COMPOSITION = "chatcache"  # the top-level package exports LLM lazily: its import is no dependency of a layer
# Tables of entry points: each route handler, command and benchmark is imported by one of them only.
REGISTRIES = {
    "chatcache",
    "chatcache.__main__",
    "chatcache.cli.main",
    "chatcache.cli.bench",
    "chatcache.gateway.routes",
}

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the dotted module name -> file, of both packages."""
    found: dict[str, Path] = {}
    for package, folder in TREES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements anywhere in a file."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of `known` that a module imports, anywhere in the file."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if full in known else source)
    return (found & set(known)) - {name}


@functools.cache
def import_graph() -> Graph:
    """Module -> modules that it imports; imports inside functions and under TYPE_CHECKING count."""
    known = modules()
    return {name: imported(name, path, known) for name, path in known.items()}


def imported_by_programs() -> Graph:
    """Return the modules of the packages that each file of the benchmarks and load tests imports."""
    known = modules()
    return {str(path): imported("", path, known) for folder in PROGRAMS for path in sorted(folder.rglob("*.py"))}


def by_package(graph: Mapping[str, set[str]]) -> Graph:
    """The graph between the packages directly below `chatcache` (and modules there)."""
    joined: Graph = {}
    for name, targets in graph.items():
        if name == COMPOSITION:
            continue
        source = ".".join(name.split(".")[:2])
        below = {".".join(target.split(".")[:2]) for target in targets if target != COMPOSITION}
        joined.setdefault(source, set()).update(below - {source})
    return joined


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def single_importers(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the modules that exactly one other module imports; packages' `__init__` do not count."""
    for name, path in modules().items():
        if path.name != "__init__.py" and sum(name in targets for targets in graph.values()) == 1:
            yield name


def is_registered(graph: Mapping[str, set[str]], name: str) -> bool:
    """Return True if the only importer of a module is a table of entry points: routes, commands, the package."""
    return all(name not in targets or importer in REGISTRIES for importer, targets in graph.items())


def main() -> None:
    """Print the figures."""
    graph = import_graph()
    importers = graph | imported_by_programs()
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    sizes = sorted(lines.values())
    longest = max(lines, key=lambda name: lines[name])
    single = sorted(single_importers(importers), key=lambda name: lines[name])
    print(f"files {len(sizes)}, lines {sum(sizes)}")
    print(f"median {statistics.median(sizes):g}, mean {statistics.mean(sizes):.0f}, max {lines[longest]} ({longest})")
    registered = [name for name in single if is_registered(importers, name)]
    print(f"modules with a single importer: {len(single)}, of which entry points in a table: {len(registered)}")
    for name in single:
        print(f"    {lines[name]:4} {name}{'  (entry point)' if name in registered else ''}")
    print(f"import cycles between modules: {cycles(graph)}")
    print(f"import cycles between packages: {cycles(by_package(graph))}")


if __name__ == "__main__":
    main()
