"""Tables grow, fork, leave for the host and come back on tiny pools; each always reads its own tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.page_table import PageTable
from tests.kv_cache.host_simulation import HostSimulation, P


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_swaps_read_what_was_written(data: st.DataObject) -> None:
    """Tables grow, fork, leave for the host and come back on tiny pools; each always reads its own tokens."""
    caching = data.draw(st.booleans())
    simulation = HostSimulation(data.draw(st.integers(10, 20)), data.draw(st.integers(2, 12)), caching)
    tables: list[tuple[PageTable, list[int]]] = []
    away: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["new", "grow", "grow", "fork", "leave", "leave", "back", "back", "end"])):
            case "new" if len(tables) < 3:
                tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 9))
                table = simulation.start([*tokens, 9])
                if table is not None:
                    simulation.step()
                    known = tokens[: table.num_tokens]
                    tables.append((table, known))
                    grow(simulation, tables, len(tables) - 1, tokens[table.num_tokens :])
            case "grow" if tables:
                index = data.draw(st.integers(0, len(tables) - 1))
                grow(simulation, tables, index, data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
            case "fork" if tables and len(tables) < 4:
                table, tokens = tables[data.draw(st.integers(0, len(tables) - 1))]
                child = simulation.kv.fork(table)
                kept = data.draw(st.integers(0, child.num_tokens))
                simulation.kv.truncate(child, kept)
                tables.append((child, tokens[:kept]))
            case "leave" if tables:
                table, tokens = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
                host_pages = simulation.kv.swap_out(simulation.kv.page_contents([table]))
                simulation.kv.close(table)
                if host_pages is not None:
                    simulation.held.append(host_pages)
                    away.append((host_pages, tokens))
                simulation.step()
            case "back" if away:
                host_pages, tokens = away[data.draw(st.integers(0, len(away) - 1))]
                back = simulation.start([*tokens, 9], host_pages)
                if back is not None:
                    assert back.num_tokens == len(tokens), "nothing is computed again"
                    simulation.drop(host_pages)
                    away.remove((host_pages, tokens))
                    simulation.step()
                    tables.append((back, tokens))
            case "end" if tables:
                simulation.kv.close(tables.pop()[0])
        simulation.check([table for table, _ in tables])
        for table, tokens in tables:
            assert simulation.read(table) == tokens


def grow(simulation: HostSimulation, tables: list[tuple[PageTable, list[int]]], index: int, tokens: list[int]) -> None:
    table, known = tables[index]
    if not tokens:
        return
    copies = simulation.kv.reserve([(table, table.num_tokens + len(tokens))])
    if copies is None:
        return
    simulation.move(list(copies))
    pages = table.pages()
    for position, token in enumerate(tokens, table.num_tokens):
        simulation.cells[pages[position // P]][position % P] = token
    simulation.kv.commit(table, encode_tokens(tokens))
    simulation.kv.complete_step()
    tables[index] = (table, [*known, *tokens])
