"""Suite-wide rules: under CI a skip is a failure, unmet hardware requirements deselect, engines are strict."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from chatcache.engine.invariants import InvariantChecker
from chatcache.kv_cache.manager import KVCache
from chatcache.scheduler.scheduler import Scheduler
from tests.strictness import MAX_STRICT_PAGES
from tests.support.machine import describe_unmet, has_gpu, unmet_requirements

NOT_RUN = pytest.StashKey[Counter[str]]()  # by marker, how many tests this machine cannot run

# How long an example takes, or the making of one, says more of what else the machine does than of the code. Every run
# tries the same examples: what fails is what was changed.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# Some cases are drawn anew in every run; every process of one run, and whoever repeats it, draws the same.
os.environ.setdefault("CHATCACHE_TEST_SEED", str(random.SystemRandom().randrange(2**31)))

# Tests run in several processes side by side. OpenMP teams that share cores with others mostly wait for a member that
# is not running, so every process (and every server a test starts) gets one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Triton decides when a kernel is defined whether it is compiled or interpreted: before any test module is imported.
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what it is anyway, said aloud: 3.9 warns where it is not


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for a process, a browser or a clock, and another may go on."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what this machine could not run, and after a failure the seed that repeats the run."""
    if counts := config.stash.get(NOT_RUN, None):
        terminalreporter.section("not run on this machine")
        for line in describe_unmet(counts):
            terminalreporter.line(line)
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.line(f"The same cases again: CHATCACHE_TEST_SEED={os.environ['CHATCACHE_TEST_SEED']}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that this machine cannot run, and long runs unless `-m long` asks for them."""
    unwanted, config.stash[NOT_RUN] = unmet_requirements(items)
    if "long" not in config.option.markexpr:
        unwanted |= {id(item) for item in items if item.get_closest_marker("long")}
    dropped = [item for item in items if id(item) in unwanted]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if id(item) not in unwanted]


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
    """Let every engine in this process raise when its books do not add up; those of huge pools look at a part only."""
    original = InvariantChecker.__init__

    def init(self: InvariantChecker, kv: KVCache, scheduler: Scheduler, *, strict: bool = False) -> None:
        original(self, kv, scheduler, strict=strict or kv.pool.num_pages <= MAX_STRICT_PAGES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InvariantChecker, "__init__", init)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Where Triton interprets kernels, and is imported already, spare it what it does over and over."""
    with pytest.MonkeyPatch.context() as patch:
        if "triton.runtime.interpreter" in sys.modules:
            importlib.import_module("tests.interpreting").remember_builtins(patch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn a skip into a failure under CI: the gate installs what tests need, so nothing may be missing there."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):  # type: ignore[attr-defined]
        report.outcome = "failed"  # type: ignore[attr-defined]
        report.longrepr = f"skipped under CI: {report.longrepr}"  # type: ignore[attr-defined]
    return report
