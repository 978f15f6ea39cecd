"""A KV cache with a host cache and simulated page contents; steps execute in the documented order."""

from __future__ import annotations

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.stats import check_invariants

P = 4


class HostSimulation:
    """A KV cache and simulated memory: the token at each offset of each device and host page."""

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
        self.kv.commit(table, encode_tokens(tokens))
        self.kv.complete_step()

    def move(self, copies: list[tuple[int, int]] | None = None) -> tuple[int, int]:
        """Execute the step's copies; return how many pages went out and in."""
        assert self.kv.host is not None
        outs, ins = self.kv.host.pending_copies()
        for page, host_page in outs:
            self.host_cells[host_page] = list(self.cells[page])
        for host_page, page in ins:
            self.cells[page] = list(self.host_cells[host_page])
        for src, dst in copies or []:
            self.cells[dst] = list(self.cells[src])
        return len(outs), len(ins)

    def step(self) -> tuple[int, int]:
        moves = self.move()
        self.kv.complete_step()
        return moves

    def read(self, table: PageTable) -> list[int]:
        return [token for page in table.pages() for token in self.cells[page]][: table.num_tokens]

    def swap_out(self, tables: list[PageTable]) -> list[int]:
        host_pages = self.kv.swap_out(self.kv.page_contents(tables))
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
        chain = self.kv.hash_pages(tokens, swapped=True)
        return self.kv.restore(self.kv.match(chain, host_pages=host_pages or []))

    def evict_all(self) -> None:
        """Overwrite every free page of the device."""
        pages = self.kv.pool.allocate(self.kv.pool.num_free)
        assert pages is not None
        for page in pages:
            self.cells[page] = [-9] * P
        self.kv.pool.release(pages)

    def check(self, tables: list[PageTable]) -> None:
        check_invariants(self.kv, tables, self.held)


def start_table(simulation: HostSimulation, tokens: list[int]) -> PageTable:
    table = simulation.start(tokens)
    assert table is not None
    return table


TOKENS = list(range(100, 111))  # two full pages and a tail of three
