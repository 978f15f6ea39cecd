"""Pool and tables against plain lists, over random operations; every invariant after every one of them.

The model keeps each table's tokens as a list, and what each cell of memory contains as the whole history up to it. A
step writes cells; copies move them; nobody else does. So reading any table back through its pages must give its tokens.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from chatcache.kv.audit import check, page_usage
from chatcache.kv.cache import KVCache
from chatcache.kv.chain import Scope
from chatcache.kv.keys import token_bytes
from chatcache.kv.table import PageTable

History = tuple[int, ...]
texts = st.lists(st.integers(1, 3), min_size=1, max_size=14)


class Cache(RuleBasedStateMachine):
    tables: Bundle[PageTable] = Bundle("tables")

    @initialize(num_pages=st.integers(4, 24), page_size=st.sampled_from([1, 2, 4]), matching=st.booleans())
    def start(self, num_pages: int, page_size: int, matching: bool) -> None:
        self.kv = KVCache(num_pages, page_size, "digest", enable_matching=matching)
        self.page_size = page_size
        self.matching = matching
        self.tokens: dict[PageTable, list[int]] = {}
        self.cells: dict[tuple[int, int], tuple[str, History]] = {}
        self.names: dict[PageTable, str] = {}

    def cell(self, table: PageTable, position: int) -> tuple[int, int]:
        return table.page_at(position // self.page_size), position % self.page_size

    @rule(target=tables, prompt=texts, namespace=st.sampled_from(["", "b"]))
    def open(self, prompt: list[int], namespace: str) -> PageTable:
        match = self.kv.match(self.kv.chain(prompt, Scope(namespace)))
        assert match.num_tokens < len(prompt)
        assert match.num_idle == sum(self.kv.pool.refs[page] == 0 for page in match.pages)
        table = self.kv.open(match)
        self.tokens[table], self.names[table] = prompt[: match.num_tokens], namespace
        return table

    @rule(chosen=st.lists(tables, min_size=1, max_size=4, unique_by=id), texts=st.lists(texts, min_size=4, max_size=4))
    def step(self, chosen: list[PageTable], texts: list[list[int]]) -> None:
        wants = [(t, t.num_tokens + len(new)) for t, new in zip(chosen, texts, strict=False) if t in self.tokens]
        before = {table: table.pages() for table in self.tokens}, list(self.kv.pool.refs)
        copies = self.kv.reserve(wants)
        if copies is None:
            assert ({table: table.pages() for table in self.tokens}, list(self.kv.pool.refs)) == before
            return
        assert not {copy.src for copy in copies} & {copy.dst for copy in copies}
        for src, dst in copies:
            for offset in range(self.page_size):
                self.cells.pop((dst, offset), None)
                if (src, offset) in self.cells:
                    self.cells[dst, offset] = self.cells[src, offset]
        for (table, goal), new in zip(wants, texts, strict=False):
            for token in new[: goal - table.num_tokens]:
                self.tokens[table].append(token)
                position = len(self.tokens[table]) - 1
                self.cells[self.cell(table, position)] = self.names[table], tuple(self.tokens[table])
        for (table, _), new in zip(wants, texts, strict=False):
            self.kv.commit(table, token_bytes(new))
        self.kv.settle()

    @rule(target=tables, parent=tables)
    def fork(self, parent: PageTable) -> PageTable:
        if parent not in self.tokens:
            return multiple()  # type: ignore[return-value]
        in_use = self.kv.pool.num_in_use
        child = self.kv.fork(parent)
        assert self.kv.pool.num_in_use == in_use
        self.tokens[child], self.names[child] = list(self.tokens[parent]), self.names[parent]
        return child

    @rule(table=tables, share=st.floats(0, 1))
    def truncate(self, table: PageTable, share: float) -> None:
        if table in self.tokens:
            kept = int(share * len(self.tokens[table]))
            self.kv.truncate(table, kept)
            del self.tokens[table][kept:]

    @rule(table=consumes(tables), forget=st.sampled_from([False, False, False, True]))
    def close(self, table: PageTable, forget: bool) -> None:
        if table not in self.tokens:
            return
        tokens, name = self.tokens.pop(table), self.names.pop(table)
        tail_shared = bool(table.tail) and self.kv.pool.refs[table.pages()[-1]] > 1
        num_full = len(tokens) // self.page_size
        in_index = all(self.kv.pool.is_published(page) for page in table.pages()[:num_full])
        self.kv.close(table, forget=forget)
        if self.matching and not forget and in_index:
            found = self.kv.match(self.kv.chain([*tokens, 1], Scope(name))).num_tokens
            assert found >= len(tokens) - (len(tokens) % self.page_size if tail_shared else 0)
        if not self.tokens:
            assert self.kv.pool.num_in_use == 0

    @rule()
    def forget_everything(self) -> None:
        self.kv.pool.forget_all()
        assert self.kv.pool.num_idle == 0

    @invariant()
    def tables_read_back_their_tokens(self) -> None:
        for table, tokens in getattr(self, "tokens", {}).items():
            assert table.num_tokens == len(tokens)
            for position in range(len(tokens)):
                assert self.cells[self.cell(table, position)] == (self.names[table], tuple(tokens[: position + 1]))

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "kv"):
            check(self.kv, list(self.tokens))
            held = {page for table in self.tokens for page in table.pages()}
            assert page_usage(self.kv, list(self.tokens)).num_in_use == len(held)


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCache = Cache.TestCase
