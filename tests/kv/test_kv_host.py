"""The host tier against a memory of plain lists that executes every plan's copies in the documented order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv.audit import check
from chatcache.kv.cache import KVCache
from chatcache.kv.chain import Scope
from chatcache.kv.keys import token_bytes
from chatcache.kv.pool import BrokenInvariant
from chatcache.kv.table import PageTable

P = 4


class Machine:
    """A cache, and cells that hold tokens: pages[p][offset], host[h][offset]."""

    def __init__(self, num_pages: int = 32, num_host_pages: int = 16, caching: bool = True) -> None:
        self.kv = KVCache(num_pages, P, "digest", caching, num_host_pages)
        self.cells = [[-1] * P for _ in range(num_pages)]
        self.host_cells = [[-1] * P for _ in range(num_host_pages)]
        self.held: list[list[int]] = []

    def write(self, table: PageTable, tokens: list[int]) -> None:
        """Run one step that computes these tokens into the table."""
        copies = self.kv.reserve([(table, table.num_tokens + len(tokens))])
        assert copies is not None
        self.move(list(copies))
        pages = table.pages()
        for position, token in enumerate(tokens, table.num_tokens):
            self.cells[pages[position // P]][position % P] = token
        self.kv.commit(table, token_bytes(tokens))
        self.kv.settle()

    def move(self, copies: list[tuple[int, int]] | None = None) -> tuple[int, int]:
        """Execute the step's copies; return how many pages went out and in."""
        assert self.kv.host is not None
        outs, ins = self.kv.host.moves()
        for page, host_page in outs:
            self.host_cells[host_page] = list(self.cells[page])
        for host_page, page in ins:
            self.cells[page] = list(self.host_cells[host_page])
        for src, dst in copies or []:
            self.cells[dst] = list(self.cells[src])
        return len(outs), len(ins)

    def step(self) -> tuple[int, int]:
        moves = self.move()
        self.kv.settle()
        return moves

    def read(self, table: PageTable) -> list[int]:
        return [token for page in table.pages() for token in self.cells[page]][: table.num_tokens]

    def swap_out(self, tables: list[PageTable]) -> list[int]:
        host_pages = self.kv.swap_out(self.kv.contents(tables))
        assert host_pages is not None
        self.held.append(host_pages)
        for table in tables:
            self.kv.close(table)
        return host_pages

    def drop(self, host_pages: list[int]) -> None:
        assert self.kv.host is not None
        self.held.remove(host_pages)
        self.kv.host.release(host_pages)

    def start(self, tokens: list[int], host_pages: list[int] | None = None) -> PageTable | None:
        chain = self.kv.own_chain(tokens, Scope())
        return self.kv.restore(self.kv.match(chain, host_pages=host_pages or []))

    def evict_all(self) -> None:
        """Overwrite every free page of the device, as a busy neighbour would."""
        pages = self.kv.pool.allocate(self.kv.pool.num_free)
        assert pages is not None
        for page in pages:
            self.cells[page] = [-9] * P
        self.kv.pool.release(pages)

    def check(self, tables: list[PageTable]) -> None:
        check(self.kv, tables, self.held)


def opened(machine: Machine, tokens: list[int]) -> PageTable:
    table = machine.start(tokens)
    assert table is not None
    return table


TOKENS = list(range(100, 111))  # two full pages and a tail of three


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
        machine.kv.commit(table, token_bytes([token]))
    machine.kv.settle()
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
    match = machine.kv.match(machine.kv.own_chain([*TOKENS, 50, 51, 52, 53], Scope()), host_pages=host_pages)
    assert match.num_tokens == 14 and machine.kv.extend(child, match)
    assert machine.step() == (0, 2)
    assert machine.read(child) == [*TOKENS, 50, 51, 52] and machine.read(again) == TOKENS
    assert child.pages()[:2] == again.pages()[:2]
    machine.check([again, child])


def test_nothing_changes_if_there_is_no_room() -> None:
    machine = Machine(num_pages=8, num_host_pages=2)
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    assert machine.kv.swap_out(machine.kv.contents([table])) is None
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
    machine.kv.pool.forget_all()
    assert machine.kv.match(machine.kv.chain(TOKENS)).num_tokens == 0, "on its way out"
    machine.step()
    again = machine.start(TOKENS)
    assert again is not None and again.num_tokens == 10
    assert machine.kv.pool.is_blank, "on its way in"
    machine.step()
    assert not machine.kv.pool.is_blank


def test_an_abandoned_step_leaves_nothing_to_be_found() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    machine.kv.abandon()
    machine.kv.pool.forget_all()
    assert machine.kv.match(machine.kv.chain(TOKENS)).num_tokens == 0
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
    machine.kv.abandon()
    assert machine.kv.pool.is_blank, "neither pages nor the tail were ever here"
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
    assert machine.kv.swap_out(machine.kv.contents([other])) is None, "all host pages are being read"
    machine.step()
    assert machine.read(again) == TOKENS
    assert machine.kv.swap_out(machine.kv.contents([other])) is not None


def test_what_a_faulty_request_computed_is_forgotten_on_the_host_too() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    host_pages = machine.swap_out([table])
    machine.step()
    again = machine.start([*TOKENS, 7, 8])
    assert again is not None
    machine.write(again, [7, 8])
    machine.kv.close(again, forget=True)
    machine.drop(host_pages)
    assert machine.kv.match(machine.kv.chain([*TOKENS, 7, 8])).num_tokens == 0
    machine.check([])


def test_held_pages_that_were_dropped_are_seen() -> None:
    machine = Machine()
    table = opened(machine, TOKENS)
    machine.write(table, TOKENS)
    machine.swap_out([table])
    machine.step()
    machine.held.clear()
    with pytest.raises(BrokenInvariant, match="host page"):
        machine.check([])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_lives_read_what_they_wrote(data: st.DataObject) -> None:
    """Tables grow, fork, leave for the host and come back on tiny pools; each always reads its own tokens."""
    caching = data.draw(st.booleans())
    machine = Machine(data.draw(st.integers(10, 20)), data.draw(st.integers(2, 12)), caching)
    tables: list[tuple[PageTable, list[int]]] = []
    away: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["new", "grow", "grow", "fork", "leave", "leave", "back", "back", "end"])):
            case "new" if len(tables) < 3:
                tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 9))
                table = machine.start([*tokens, 9])
                if table is not None:
                    machine.step()
                    known = tokens[: table.num_tokens]
                    tables.append((table, known))
                    grow(machine, tables, len(tables) - 1, tokens[table.num_tokens :])
            case "grow" if tables:
                index = data.draw(st.integers(0, len(tables) - 1))
                grow(machine, tables, index, data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
            case "fork" if tables and len(tables) < 4:
                table, tokens = tables[data.draw(st.integers(0, len(tables) - 1))]
                child = machine.kv.fork(table)
                kept = data.draw(st.integers(0, child.num_tokens))
                machine.kv.truncate(child, kept)
                tables.append((child, tokens[:kept]))
            case "leave" if tables:
                table, tokens = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
                host_pages = machine.kv.swap_out(machine.kv.contents([table]))
                machine.kv.close(table)
                if host_pages is not None:
                    machine.held.append(host_pages)
                    away.append((host_pages, tokens))
                machine.step()
            case "back" if away:
                host_pages, tokens = away[data.draw(st.integers(0, len(away) - 1))]
                back = machine.start([*tokens, 9], host_pages)
                if back is not None:
                    assert back.num_tokens == len(tokens), "nothing is computed again"
                    machine.drop(host_pages)
                    away.remove((host_pages, tokens))
                    machine.step()
                    tables.append((back, tokens))
            case "end" if tables:
                machine.kv.close(tables.pop()[0])
        machine.check([table for table, _ in tables])
        for table, tokens in tables:
            assert machine.read(table) == tokens


def grow(machine: Machine, tables: list[tuple[PageTable, list[int]]], index: int, tokens: list[int]) -> None:
    table, known = tables[index]
    if not tokens:
        return
    copies = machine.kv.reserve([(table, table.num_tokens + len(tokens))])
    if copies is None:
        return
    machine.move(list(copies))
    pages = table.pages()
    for position, token in enumerate(tokens, table.num_tokens):
        machine.cells[pages[position // P]][position % P] = token
    machine.kv.commit(table, token_bytes(tokens))
    machine.kv.settle()
    tables[index] = (table, [*known, *tokens])
