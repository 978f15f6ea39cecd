"""Suite-wide rules: test tiers, hardware requirements, strict engines; under CI a skip is a failure.

Tiers: the default tier is fast; `--tier slow` runs the tests marked `slow` instead, `--tier all` both. Tests marked
`long` run only with `-m long`. A test that is named on the command line (`file.py::test`, `-k name`) always runs.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from chatcache.engine.invariants import InvariantChecker
from chatcache.kv_cache.manager import KVCache
from chatcache.scheduler.scheduler import Scheduler
from tests.support.invariant_checks import MAX_STRICT_PAGES
from tests.support.machine import describe_unmet, has_gpu, unmet_requirements

gc.disable()  # until all modules are imported, which makes a million objects: visiting them takes a second each time

NOT_RUN = pytest.StashKey[Counter[str]]()  # by marker, how many tests this machine cannot run

# No deadlines: the time of an example depends on the load of the machine. Examples are derived from the test, so that
# every run tries the same ones, apart from those of `make fuzz`.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")

# Some cases are random in every run. The seed is shared by all processes of a run and printed after a failure.
os.environ.setdefault("CHATCACHE_TEST_SEED", str(random.SystemRandom().randrange(2**31)))

# Tests run in parallel processes. OpenMP teams that share cores mostly wait for a member that is not scheduled, so
# every process (and every server that a test starts) gets one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Triton reads this when a kernel is defined, so it must be set before any test module is imported.
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default; Triton 3.9 warns if unset


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier`."""
    parser.addoption("--tier", choices=("default", "slow", "all"), help="test tier to run")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a full-size run take longer than `faulthandler_timeout`."""
    if item.get_closest_marker("long"):
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than cores: many tests wait for a process, a browser or a timer."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what this machine could not run, and after a failure the seed that repeats the run."""
    if counts := config.stash.get(NOT_RUN, None):
        terminalreporter.section("not run on this machine")
        for line in describe_unmet(counts):
            terminalreporter.line(line)
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.line(f"The same cases again: CHATCACHE_TEST_SEED={os.environ['CHATCACHE_TEST_SEED']}")


def _tier(config: pytest.Config) -> str:
    """Return the tier to run: all if the command line selects tests and no tier."""
    if config.option.tier is not None:
        return str(config.option.tier)
    is_explicit = config.option.markexpr or config.option.keyword or any("::" in arg for arg in config.args)
    return "all" if is_explicit else "default"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules without a test of the tier: importing and rewriting them takes most of the collection time."""
    if collection_path.suffix != ".py" or (tier := _tier(config)) == "all":
        return None
    source = collection_path.read_text(encoding="utf-8")
    is_slow_only = re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", source, re.MULTILINE)
    is_unwanted = is_slow_only if tier == "default" else "mark.slow" not in source
    return True if is_unwanted else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that this machine cannot run and tests of other tiers."""
    unwanted, config.stash[NOT_RUN] = unmet_requirements(items)
    if "long" not in config.option.markexpr:
        unwanted |= {id(item) for item in items if item.get_closest_marker("long")}
        if (tier := _tier(config)) != "all":
            is_wanted = tier == "slow"
            unwanted |= {id(item) for item in items if (item.get_closest_marker("slow") is not None) != is_wanted}
    dropped = [item for item in items if id(item) in unwanted]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if id(item) not in unwanted]


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never visit the objects of imported modules and collected tests."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report what is left at the end


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a pytest-xdist worker to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        counts: Counter[str] = session.config.stash.get(NOT_RUN, Counter())
        session.config.workeroutput["not_run"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep the counts of a pytest-xdist worker; every worker collects the same tests."""
    if counts := getattr(node, "workeroutput", {}).get("not_run"):
        node.config.stash[NOT_RUN] = Counter(counts)


@pytest.fixture(autouse=True, scope="session")
def strict_engines() -> Iterator[None]:
    """Make every engine raise on a broken invariant; for huge pools the check covers a part."""
    original = InvariantChecker.__init__

    def init(self: InvariantChecker, kv: KVCache, scheduler: Scheduler, *, strict: bool = False) -> None:
        original(self, kv, scheduler, strict=strict or kv.pool.num_pages <= MAX_STRICT_PAGES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InvariantChecker, "__init__", init)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Cache lookups of Triton's interpreter if it is in use, which makes it twice as fast."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
            importlib.import_module("tests.support.triton_interpreter").cache_lookups(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_certificates() -> Iterator[None]:
    """Read the certificates of authorities once, not for each of hundreds of HTTP clients (25 ms)."""
    with pytest.MonkeyPatch.context() as patch:
        if "httpx" in sys.modules:
            transports = importlib.import_module("httpx._transports.default")
            patch.setattr(transports, "create_ssl_context", cache(transports.create_ssl_context))
        yield


@pytest.fixture
def dot_of_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter add up each element of a product alone.

    The product of numpy's BLAS depends, on some CPUs, on where a row stands in its tile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("tests.support.triton_interpreter").multiply_rows_alone(monkeypatch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn a skip into a failure under CI, which installs everything that tests need."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):  # type: ignore[attr-defined]
        report.outcome = "failed"  # type: ignore[attr-defined]
        report.longrepr = f"skipped under CI: {report.longrepr}"  # type: ignore[attr-defined]
    return report
