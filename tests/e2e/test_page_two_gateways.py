"""Test the page through a load balancer without stickiness in front of two gateways: it works as with one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.servers import GatewayOnly, Worker
from tests.e2e.conftest import BUILT_PAGE
from tests.e2e.requirements import require
from tests.e2e.test_page_forks import test_fork_chip_shows_the_counts_of_the_server
from tests.e2e.test_page_reconnect import (
    test_reload_during_a_reply_continues_the_stream,
    test_reload_during_candidates_and_a_regenerated_reply_continues,
    test_two_tabs_show_one_conversation_live,
)
from tests.e2e.test_page_steering import (
    test_message_sent_during_an_answer_stops_it_and_keeps_its_tokens,
    test_queued_messages_follow_and_can_be_taken_back,
)
from tests.e2e.test_page_turns import (
    test_edit_adds_a_branch_and_both_branches_stay,
    test_escape_stops_and_keeps_the_text,
    test_regenerate_adds_a_version_and_a_reload_keeps_the_shown_one,
    test_second_turn_hits_the_cache_and_a_reload_keeps_both,
)
from tests.support.redis_servers import redis_server
from tests.support.round_robin import RoundRobin

pytestmark = pytest.mark.slow
WALKS = (  # pytest runs them in this module, with its server
    test_edit_adds_a_branch_and_both_branches_stay,
    test_escape_stops_and_keeps_the_text,
    test_fork_chip_shows_the_counts_of_the_server,
    test_message_sent_during_an_answer_stops_it_and_keeps_its_tokens,
    test_queued_messages_follow_and_can_be_taken_back,
    test_regenerate_adds_a_version_and_a_reload_keeps_the_shown_one,
    test_reload_during_a_reply_continues_the_stream,
    test_reload_during_candidates_and_a_regenerated_reply_continues,
    test_second_turn_hits_the_cache_and_a_reload_keeps_both,
    test_two_tabs_show_one_conversation_live,
)
DEMO_MODEL = ""


class ThrottledWorker(Worker):
    """A worker that generates endless replies slowly."""

    def command(self, folder: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "tests.e2e.throttled_server", *super().command(folder, *more)[3:]]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundRobin]:
    """A proxy in front of two gateways, whose engine is one worker."""
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    cwd: Path = tmp_path_factory.mktemp("gateways")
    with redis_server(cwd / "redis") as redis, contextlib.ExitStack() as stack:
        bus = ("--bus", redis.url)
        worker = ThrottledWorker(DEMO_MODEL, cwd, *bus, "--worker-name", "w", "--kv-memory", "64MiB")
        gateways = [GatewayOnly(DEMO_MODEL, cwd, *bus, "--redis", redis.url) for _ in range(2)]
        for process in (worker, *gateways):
            stack.callback(process.stop)
        proxy = RoundRobin([httpx.URL(gateway.ready()).port or 0 for gateway in gateways])
        stack.callback(proxy.close)
        yield proxy


@pytest.fixture(scope="module")
def server(proxy: RoundRobin) -> str:
    """Address of the proxy."""
    return f"http://127.0.0.1:{proxy.port}"


@pytest.fixture(autouse=True)
def both_gateways_are_used(proxy: RoundRobin) -> Iterator[None]:
    """Check that the connections of a test reached both gateways."""
    before = dict(proxy.counts)
    yield
    assert all(count > before[port] for port, count in proxy.counts.items())
