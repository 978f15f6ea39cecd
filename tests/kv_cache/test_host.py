"""The host tier, step by step: what leaves, what comes back, and what nobody may find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chatcache.kv_cache.host import HostKVCache
from chatcache.kv_cache.page_hash import PageContent, encode_tokens
from chatcache.kv_cache.pool import InvariantError, PagePool
from tests.kv_cache.host_machine import TOKENS, Machine, opened


@pytest.mark.parametrize("caching", [True, False])
def test_everything_comes_back(caching: bool) -> None:
    machine = Machine(caching=caching)
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    assert len(host_pages) == 3 and machine.kv.pool.num_in_use == 0
    assert machine.step() == (3, 0)
    machine.evict_all()
    again = machine.start([*TOKENS, 7], host_pages)
    assert again is not None and again.num_tokens == 11
    assert machine.step() == (0, 3)
    assert machine.read(again) == TOKENS
    machine.drop(host_pages)
    machine.check([again])
    machine.write(again, [7, 8])
    assert machine.read(again) == [*TOKENS, 7, 8]


def test_what_the_device_still_has_is_not_loaded() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    machine.swap_out([table])
    machine.step()
    again = machine.start([*TOKENS, 7])
    assert again is not None and again.num_tokens == 11 and machine.step() == (0, 0)


def test_pages_may_be_overwritten_in_the_step_that_copies_them_out() -> None:
    machine = Machine(num_pages=4)
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    other = opened(machine, [1] * 9)
    machine.write(other, [1] * 9)  # takes all three pages, in the same step
    assert machine.read(other) == [1] * 9
    machine.kv.close(other)
    again = machine.start([*TOKENS, 7], host_pages)
    assert again is not None and machine.step() == (0, 3) and machine.read(again) == TOKENS


def test_shared_pages_leave_once_and_forks_keep_their_own_tails() -> None:
    machine = Machine()
    a = opened(machine, TOKENS)
    machine.write(a, TOKENS)
    b = machine.kv.fork(a)
    copies = machine.kv.reserve([(a, 12), (b, 12)])
    assert copies is not None and len(copies) == 1
    machine.move(list(copies))
    for table, token in ((a, 1), (b, 2)):
        machine.cells[table.page_at(2)][3] = token
        machine.kv.commit(table, encode_tokens([token]))
    machine.kv.complete_step()
    host_pages = machine.swap_out([a, b])
    assert len(host_pages) == 4 and machine.step() == (4, 0)
    machine.evict_all()
    first = machine.start([*TOKENS, 1, 5])
    assert first is not None and machine.step() == (0, 3) and machine.read(first) == [*TOKENS, 1]
    second = machine.start([*TOKENS, 2, 5])
    assert second is not None and machine.step() == (0, 1), "the full pages are found on the device now"
    assert machine.read(second) == [*TOKENS, 2]
    assert second.pages()[:2] == first.pages()[:2]


def test_a_fork_is_lengthened_by_its_own_pages() -> None:
    """Without the index: the child shares its partner's pages and loads only what is its own."""
    machine = Machine(caching=False)
    a = opened(machine, TOKENS)
    machine.write(a, TOKENS)
    b = machine.kv.fork(a)
    machine.write(b, [50, 51, 52])
    host_pages = machine.swap_out([a, b])
    machine.step()
    machine.evict_all()
    again = machine.start([*TOKENS, 1], host_pages)
    assert again is not None and machine.step() == (0, 3)
    child = machine.kv.fork(again)
    machine.kv.truncate(child, 8)
    chain = machine.kv.hash_pages([*TOKENS, 50, 51, 52, 53], swapped=True)
    match = machine.kv.match(chain, host_pages=host_pages)
    assert match.num_tokens == 14 and machine.kv.extend(child, match)
    assert machine.step() == (0, 2)
    assert machine.read(child) == [*TOKENS, 50, 51, 52] and machine.read(again) == TOKENS
    assert child.pages()[:2] == again.pages()[:2]
    machine.check([again, child])


def test_nothing_changes_if_there_is_no_room() -> None:
    machine = Machine(num_pages=8, num_host_pages=2)
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    assert machine.kv.swap_out(machine.kv.page_contents([table])) is None
    machine.check([table])
    machine.kv.truncate(table, 8)
    host_pages = machine.swap_out([table])
    machine.step()
    machine.evict_all()
    taken = machine.kv.pool.allocate(6)
    assert taken is not None
    assert machine.start([*TOKENS, 7]) is None, "one page is free, two are to come"
    machine.kv.pool.release(taken)
    machine.drop(host_pages)
    machine.check([])


def test_contents_exist_after_the_step_only() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    machine.swap_out([table])
    machine.kv.pool.unpublish_all()
    assert machine.kv.match(machine.kv.hash_pages(TOKENS)).num_tokens == 0, "on its way out"
    machine.step()
    again = machine.start(TOKENS)
    assert again is not None and again.num_tokens == 10
    assert machine.kv.pool.is_index_empty, "on its way in"
    machine.step()
    assert not machine.kv.pool.is_index_empty


def test_an_abandoned_step_leaves_nothing_to_be_found() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    machine.kv.abort_step()
    machine.kv.pool.unpublish_all()
    assert machine.kv.match(machine.kv.hash_pages(TOKENS)).num_tokens == 0
    machine.drop(host_pages)
    machine.check([])

    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    machine.swap_out([table])
    machine.step()
    machine.evict_all()
    again = machine.start([*TOKENS, 7])
    assert again is not None and again.num_tokens == 11
    machine.kv.close(again)
    machine.kv.abort_step()
    assert machine.kv.pool.is_index_empty, "neither pages nor the tail were ever here"
    machine.check([])


def test_a_load_given_up_before_the_step_is_not_made() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    machine.step()
    machine.evict_all()
    again = machine.start([*TOKENS, 7])
    assert again is not None
    swapped_again = machine.swap_out([again])
    assert sorted(swapped_again) == sorted(host_pages), "what was to come is still there, and is held twice"
    assert machine.step() == (0, 0)
    machine.check([])


def test_a_page_being_read_is_not_overwritten() -> None:
    machine = Machine(num_host_pages=3)
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    machine.step()
    machine.evict_all()
    other = opened(machine, [1] * 9)
    machine.write(other, [1] * 9)
    again = machine.start([*TOKENS, 7])
    assert again is not None
    machine.drop(host_pages)
    assert machine.kv.swap_out(machine.kv.page_contents([other])) is None, "all host pages are being read"
    machine.step()
    assert machine.read(again) == TOKENS
    assert machine.kv.swap_out(machine.kv.page_contents([other])) is not None


def test_what_a_faulty_request_computed_is_forgotten_on_the_host_too() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    machine.step()
    again = machine.start([*TOKENS, 7, 8])
    assert again is not None
    machine.write(again, [7, 8])
    machine.kv.close(again, discard=True)
    machine.drop(host_pages)
    assert machine.kv.match(machine.kv.hash_pages([*TOKENS, 7, 8])).num_tokens == 0
    machine.check([])


def test_held_pages_that_were_dropped_are_seen() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    machine.swap_out([table])
    machine.step()
    machine.held.clear()
    with pytest.raises(InvariantError, match="host page"):
        machine.check([])


def loads_outlive_their_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostKVCache, "cancel_unreferenced_loads", lambda self, refs: None)


def pages_yet_to_come_are_copied_out(patch: pytest.MonkeyPatch) -> None:
    original = HostKVCache._partition

    def sort(self: HostKVCache, contents: dict[int, PageContent]) -> object:
        coming, self._pending_loads = self._pending_loads, {}
        try:
            return original(self, contents)
        finally:
            self._pending_loads = coming

    def find(self: PagePool, content: PageContent) -> None:
        """As if the host had let go of it meanwhile."""

    patch.setattr(HostKVCache, "_partition", sort)
    patch.setattr(PagePool, "find", find)


def page_being_read_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostKVCache, "load", lambda self, page, load: self._pending_loads.update({page: load}))
    patch.setattr(HostKVCache, "abort_step", lambda self: self._pending_loads.clear())


def beginnings_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "published_prefixes", lambda self, parent, tokens: [])


@pytest.mark.parametrize(
    ("bug", "check_of_it"),
    [
        (loads_outlive_their_pages, test_a_load_given_up_before_the_step_is_not_made),
        (pages_yet_to_come_are_copied_out, test_a_load_given_up_before_the_step_is_not_made),
        (page_being_read_is_not_pinned, test_a_page_being_read_is_not_overwritten),
        (beginnings_are_not_forgotten, test_what_a_faulty_request_computed_is_forgotten_on_the_host_too),
    ],
)
def test_planted_bugs_are_caught(
    bug: Callable[[pytest.MonkeyPatch], None], check_of_it: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        check_of_it()
