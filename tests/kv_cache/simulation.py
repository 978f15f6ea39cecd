"""Random operations on a KV cache with a host cache, compared with a model of plain lists after every operation.

The model records the tokens of each table and, for every cell of memory, the whole history up to the token written
there, as a hash chain, and its owner (PUBLIC or a namespace). Steps are planned and executed as in the engine: tables
are reserved, opened, preempted and swapped in while a step is planned; then pages are copied, all branches read, all
branches write, and only then are tokens committed. Blank pages are poisoned at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from chatcache.kv_cache.copy_on_write import PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES, CacheScope, encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import PagePool
from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.kv_cache.stats import check_invariants, page_usage
from tests.kv_cache.page_map_oracle import KeyOwners, check_map
from tests.kv_cache.slot_oracle import check_slots

POISON = -1
PUBLIC = "public"
NAMESPACES = ("", "b")
MAP_EVERY = 8  # steps
Cell = tuple[int, str]


@dataclass(eq=False)
class SimulatedBranch:
    """A table and its expected contents.

    `row` is the runner's copy of the table, updated by `pop_changes` only. The first `num_matched` tokens were cached.
    """

    table: PageTable
    scope: CacheScope
    num_public: int
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    num_matched: int = 0

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.cells.append(hash((self.cells[-1] if self.cells else 0, token)))

    def cut(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:], self.cells[num_tokens:]
        self.num_matched = min(self.num_matched, num_tokens)

    def computed_pages(self, page_size: int) -> list[int]:
        """Return the pages that hold a token computed by this branch, or a cell reserved for one."""
        table, first = self.table, self.num_matched // page_size
        return table.pages()[first:] if max(len(self.tokens), table.num_reserved) > self.num_matched else []

    def send_changes(self) -> None:
        first, pages = self.table.pop_changes()
        assert first <= len(self.row)
        self.row[first:] = pages


@dataclass(eq=False)
class SwappedBranch:
    """A branch whose pages were swapped to the host."""

    host_pages: list[int]
    tokens: list[int]
    scope: CacheScope


class CacheSimulation:
    """One cache and its model. `step` runs a random operation and verifies everything; `trace` lists operations."""

    def __init__(self, rng: random.Random, audit: bool = True) -> None:
        self.audit = audit
        self.rng = rng
        self.page_size = P = rng.choice([1, 2, 2, 3, 4, 4])
        self.matching = rng.random() < 0.9
        num_pages, num_host_pages = rng.randint(4, 24), rng.choice([0, 0, rng.randint(2, 12)])
        self.kv = KVCache(num_pages, P, "digest", self.matching, num_host_pages)
        self.memory: list[list[Cell]] = [[(POISON, "")] * P for _ in range(num_pages)]
        self.host_memory: list[list[Cell]] = [[(POISON, "")] * P for _ in range(num_host_pages)]
        self.key_owners = KeyOwners(self.kv, NAMESPACES)
        self.branches: list[SimulatedBranch] = []
        self.swapped: list[SwappedBranch] = []
        self.planned: list[tuple[SimulatedBranch, list[int]]] = []  # rows of the step being planned
        self.fresh: list[SimulatedBranch] = []  # opened or swapped in during this step
        self.copies: list[PageCopy] = []
        self.texts: list[tuple[list[int], CacheScope]] = [([], CacheScope())]
        self.num_steps = 0
        self.trace: list[str] = []

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.run_operation(self.rng.choices(list(OPERATION_WEIGHTS), list(OPERATION_WEIGHTS.values()))[0])

    def run_operation(self, name: str) -> None:
        """Run the named operation and verify everything."""
        self.num_steps += 1
        self.trace.append(name)
        getattr(self, name)()
        self.verify()

    def run_step(self) -> None:
        """Plan, execute and commit a step; sometimes a row is faulty or the whole step is aborted."""
        rng = self.rng
        self.reserve(rng.sample(self.branches, min(len(self.branches), rng.randint(0, 3))))
        for _ in range(rng.choice([0, 0, 1, 2])):
            rng.choice([self.open, self.open, self.preempt, self.swap_out, self.swap_in])()
        self.reserve([branch for branch in self.fresh if rng.random() < 0.8])
        if rng.random() < 0.04:
            self.abandon()
        else:
            self.execute(faulty=rng.random() < 0.05)

    def open(self) -> None:
        rng = self.rng
        if len(self.branches) >= 8:
            return
        known, scope = rng.choice(self.texts)
        prompt = known[: rng.randint(0, len(known))] + [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.4:
            scope = CacheScope(rng.choice(NAMESPACES), rng.choice([0, 0, rng.randint(0, len(prompt))]))
        self.texts = [*self.texts[-7:], (prompt, scope)]
        match = self.kv.match(self.kv.hash_pages(prompt, scope))
        self.verify_match(match, prompt)
        if match.loads:
            table = self.kv.restore(match)
            if table is None:
                return
        else:
            table = self.kv.open(match)
        self.begin(table, prompt[: match.num_tokens], scope)

    def begin(self, table: PageTable, tokens: list[int], scope: CacheScope) -> None:
        branch = SimulatedBranch(table, scope, scope.num_public_tokens // self.page_size)
        for token in tokens:
            branch.append(token)
        branch.num_matched = len(tokens)
        self.branches.append(branch)
        self.fresh.append(branch)

    def reserve(self, branches: list[SimulatedBranch]) -> None:
        """Plan new tokens for these branches, if enough pages are free for all of them."""
        branches = [branch for branch in branches if all(branch is not other for other, _ in self.planned)]
        news = [[self.rng.randint(1, 3) for _ in range(self.rng.choice([1, 1, 2, 5]))] for _ in branches]
        wants = [(branch.table, len(branch.tokens) + len(new)) for branch, new in zip(branches, news, strict=True)]
        before = [branch.table.pages() for branch in self.branches], list(self.kv.pool.refs)
        copies = self.kv.reserve(wants)
        if copies is None:
            assert ([branch.table.pages() for branch in self.branches], self.kv.pool.refs) == before, (
                "reserve failed and changed the cache"
            )
            return
        self.copies += copies
        self.planned += zip(branches, news, strict=True)

    def execute(self, *, faulty: bool = False) -> None:
        """Execute the step in the runner's order, then commit it as the scheduler does."""
        self.move_pages()
        for branch, _ in self.planned:
            branch.send_changes()
            assert self.read(branch.row, len(branch.tokens)) == branch.cells, "a row reads the tokens of another branch"
        for branch, new in self.planned:
            self.write(branch, new)
        failed = [branch for branch, _ in self.planned if faulty and self.rng.random() < 0.5]
        for branch, new in self.planned:
            if branch not in failed:
                self.kv.commit(branch.table, encode_tokens(new))
        for branch in failed:
            self.end(branch, discard=True)
        self.kv.complete_step()
        self.planned, self.fresh, self.copies = [], [], []

    def move_pages(self) -> None:
        assert not {copy.src for copy in self.copies} & {copy.dst for copy in self.copies}
        outs, ins = self.kv.host.pending_copies() if self.kv.host is not None else ([], [])
        for page, host_page in outs:
            self.host_memory[host_page] = list(self.memory[page])
        for host_page, page in ins:
            self.memory[page] = list(self.host_memory[host_page])
        for src, dst in self.copies:
            self.memory[dst] = list(self.memory[src])

    def write(self, branch: SimulatedBranch, new: list[int]) -> None:
        size = self.page_size
        for token in new:
            index, offset = divmod(len(branch.tokens), size)
            page = branch.row[index]
            if not offset or token is new[0]:
                self.verify_writable(branch, page)
            branch.append(token)
            owner = PUBLIC if index < branch.num_public else branch.scope.namespace
            self.memory[page][offset] = branch.cells[-1], owner

    def abandon(self) -> None:
        """Abort the step: it is unknown what it wrote, so all branches in it end."""
        for copy in self.copies:
            self.memory[copy.dst] = [(POISON, "")] * self.page_size
        for branch in list(dict.fromkeys([branch for branch, _ in self.planned] + self.fresh)):
            self.end(branch, discard=True)
        self.kv.abort_step()
        self.planned, self.fresh, self.copies = [], [], []

    # -- other operations -----------------------------------------------------------------------------------------

    def fork(self) -> None:
        if not self.branches or len(self.branches) >= 8:
            return
        parent, num_in_use = self.rng.choice(self.branches), self.kv.pool.num_in_use
        table = self.kv.fork(parent.table)
        assert self.kv.pool.num_in_use == num_in_use, "a fork must not take a page"
        row = parent.row[: table.changed_from]
        child = SimulatedBranch(table, parent.scope, parent.num_public, list(parent.tokens), list(parent.cells), row)
        child.num_matched = parent.num_matched
        self.branches.append(child)
        if self.rng.random() < 0.3:
            self.cut(child)
        elif self.rng.random() < 0.5:
            self.continue_in_other_scope(child)

    def truncate(self) -> None:
        if self.branches:
            self.cut(self.rng.choice(self.branches))

    def cut(self, branch: SimulatedBranch) -> None:
        num_tokens = len(branch.tokens)
        num_kept = self.rng.choice([self.rng.randint(0, num_tokens), max(num_tokens - 1, 0)])
        self.kv.truncate(branch.table, num_kept)
        branch.cut(num_kept)
        del branch.row[branch.table.num_pages :]
        if num_kept < num_tokens:
            branch.num_public = min(branch.num_public, num_kept // self.page_size)

    def continue_in_other_scope(self, branch: SimulatedBranch) -> None:
        """Continue the branch as another prompt with the same first tokens and its own public tokens."""
        num_tokens = len(branch.tokens)
        num_kept = self.rng.choice([num_tokens, self.rng.randint(0, num_tokens)])
        branch.scope = CacheScope(branch.scope.namespace, self.rng.choice([0, 0, self.rng.randint(0, num_tokens + 4)]))
        self.kv.truncate(branch.table, num_kept, branch.scope)
        branch.cut(num_kept)
        del branch.row[branch.table.num_pages :]
        if num_kept // self.page_size < branch.num_public:
            branch.num_public = max(branch.scope.num_public_tokens, num_kept) // self.page_size

    def advance_pages(self) -> None:
        """Fill the last page of some branches without committing, then advance all of them by a page, or none."""
        branches = [branch for branch in self.branches if self.fills_last_page(branch.table)][:3]
        for branch in branches:
            branch.send_changes()
        filled: list[tuple[PageTable, bytes]] = []
        for branch in branches:
            new = [self.rng.randint(1, 3) for _ in range(branch.table.num_reserved - len(branch.tokens))]
            assert self.read(branch.row, len(branch.tokens)) == branch.cells
            self.write(branch, new)
            filled.append((branch.table, encode_tokens(new)))
        whole = [table.tail_tokens + tokens for table, tokens in filled]
        pages = self.kv.advance_pages([branch.table for branch in branches], b"".join(whole))
        for number, branch in enumerate(branches):
            if pages is None:
                self.kv.commit(*filled[number])
            else:
                branch.row.append(pages[number])

    def fills_last_page(self, table: PageTable) -> bool:
        num_left = table.num_reserved - table.num_tokens
        return 0 < num_left <= self.page_size and table.num_reserved > table.num_public_pages * self.page_size

    def close(self) -> None:
        if self.branches:
            self.end(self.rng.choice(self.branches), discard=self.rng.random() < 0.1)

    def preempt(self) -> None:
        """Close a branch while a step is planned, so that other branches of the step can get its pages."""
        candidates = [branch for branch in self.branches if all(branch is not other for other, _ in self.planned)]
        if candidates:
            self.end(self.rng.choice(candidates))

    def end(self, branch: SimulatedBranch, *, discard: bool = False) -> None:
        self.branches.remove(branch)
        if branch in self.fresh:
            self.fresh.remove(branch)
        table, pool = branch.table, self.kv.pool
        pages = table.pages()
        self.texts = [*self.texts[-7:], (branch.tokens, self.scope_of(branch))]
        num_full = table.num_tokens // self.page_size
        in_step = bool(self.planned or self.fresh or self.copies)
        whole = self.matching and not in_step and all(map(self.is_reachable, pages[:num_full]))
        alone = bool(table.tail_tokens) and pool.refs[pages[num_full]] == 1
        if alone and (content := pool.content(pages[num_full])) is not None:
            alone = content.parent == table.key  # else it has a public key, and keeps it
        tokens, scope = branch.tokens[: table.num_tokens], self.scope_of(branch)
        computed = set(branch.computed_pages(self.page_size))
        contents = self.kv.page_contents([table])
        published = [page for page in pages if pool.is_published(page)]
        self.kv.close(table, discard=discard)
        match = self.kv.match(self.kv.hash_pages([*tokens, 1], scope))
        if discard:
            assert not computed & set(match.pages) - {0}, "a discarded page was matched"
            assert [page for page in published if page not in computed] == list(filter(pool.is_published, published)), (
                "a page that the failed branch had matched was unpublished"
            )
            if self.kv.host is not None:
                first, num_kept = divmod(branch.num_matched, self.page_size)
                for page in computed & contents.keys():
                    num_tokens = len(contents[page].tokens) // TOKEN_BYTES
                    is_copy_of_match = page == pages[first] and num_tokens <= num_kept
                    assert is_copy_of_match or self.kv.host.pool.find(contents[page]) is None, (
                        "a copy of a discarded page is cached"
                    )
        elif whole:
            assert match.num_tokens >= (len(tokens) if alone else num_full * self.page_size), (
                "a closed branch was not matched"
            )

    def is_reachable(self, page: int) -> bool:
        """Return whether this page, or another one with the same contents, is published."""
        content = self.kv.pool.content(page)
        return content is not None and self.kv.pool.find(content) is not None

    def scope_of(self, branch: SimulatedBranch) -> CacheScope:
        """Return the scope of the branch's page keys; after a truncation, public tokens are private."""
        return CacheScope(branch.scope.namespace, branch.num_public * self.page_size)

    def swap_out(self) -> None:
        candidates = [branch for branch in self.branches if all(branch is not other for other, _ in self.planned)]
        if self.kv.host is None or not candidates:
            return
        branch = self.rng.choice(candidates)
        host_pages = self.kv.swap_out(self.kv.page_contents([branch.table]))
        if host_pages is not None:
            self.swapped.append(
                SwappedBranch(host_pages, branch.tokens[: branch.table.num_tokens], self.scope_of(branch))
            )
            self.end(branch)

    def swap_in(self) -> None:
        if not self.swapped or len(self.branches) >= 8 or self.kv.host is None:
            return
        swapped = self.rng.choice(self.swapped)
        if self.rng.random() < 0.8:
            prompt = [*swapped.tokens, 1]
            match = self.kv.match(
                self.kv.hash_pages(prompt, swapped.scope, swapped=True), host_pages=swapped.host_pages
            )
            self.verify_match(match, prompt)
            table = self.kv.restore(match)
            if table is None:
                return
            self.begin(table, swapped.tokens[: match.num_tokens], swapped.scope)
        self.kv.host.release(swapped.host_pages)
        self.swapped.remove(swapped)

    def swap_out_now(self) -> None:
        self.swap_out()
        self.execute()

    def unpublish_all(self) -> None:
        self.kv.pool.unpublish_all()
        assert self.kv.pool.num_idle == 0

    # -- invariants -----------------------------------------------------------------------------------------------

    def read(self, pages: list[int], num_tokens: int) -> list[int]:
        return [cell for page in pages for cell, _ in self.memory[page]][:num_tokens]

    def verify(self) -> None:
        """Verify the whole state between steps, and poison blank pages."""
        kv, pool = self.kv, self.kv.pool
        for branch in self.branches:
            assert branch.table.num_tokens == len(branch.tokens)
            assert self.read(branch.table.pages(), len(branch.tokens)) == branch.cells, "a page lost its tokens"
        self.key_owners.read()
        if self.audit:
            check_invariants(
                kv, [branch.table for branch in self.branches], [swapped.host_pages for swapped in self.swapped]
            )
        if self.num_steps % MAP_EVERY == 0:
            tables = [branch.table for branch in self.branches]
            check_map(kv, self.key_owners, tables, NAMESPACES)
            num_kept_free = self.num_steps % pool.num_pages
            check_slots(kv, tables, page_usage(kv, tables, num_kept_free), num_kept_free)
        held = {page for branch in self.branches for page in branch.table.pages()}
        assert pool.num_in_use == len(held) and len(pool._blank) + pool.num_idle + len(held) == pool.num_usable
        poison(pool, self.memory, 0)
        if kv.host is not None:
            poison(kv.host.pool, self.host_memory, 1)

    def verify_writable(self, branch: SimulatedBranch, page: int) -> None:
        assert not self.kv.pool.is_published(page), "a published page is written"
        for other in self.branches:
            assert other is branch or page not in other.table.pages(), "a page that another branch holds is written"

    def verify_match(self, match: PrefixMatch, prompt: list[int]) -> None:
        """Verify that a match holds this prompt's first tokens, final, and visible to its namespace."""
        assert match.num_tokens < len(prompt)
        assert match.num_idle == sum(page != 0 and self.kv.pool.refs[page] == 0 for page in match.pages)
        loads = dict(match.loads)
        cell, size, scope = 0, self.page_size, match.scope
        for position, token in enumerate(prompt[: match.num_tokens]):
            cell = hash((cell, token))
            index, offset = divmod(position, size)
            page = self.host_memory[loads[index] - 1] if index in loads else self.memory[match.pages[index]]
            found, owner = page[offset]
            assert found == cell, "a matched page holds other tokens"
            is_public = index < scope.num_public_tokens // size
            assert owner == PUBLIC or (owner == scope.namespace and not is_public), (
                "a page of another tenant was matched"
            )


def poison(pool: PagePool, memory: list[list[Cell]], first: int) -> None:
    for page in pool._blank:
        memory[page - first] = [(POISON, "")] * len(memory[page - first])


OPERATION_WEIGHTS = {
    "run_step": 10,
    "fork": 3,
    "truncate": 1,
    "advance_pages": 1,
    "close": 3,
    "swap_out_now": 1,
    "unpublish_all": 0.1,
}


def run_simulation(seed: int, num_steps: int, *, audit: bool = True) -> CacheSimulation:
    """Run one simulation; a failure reports its seed, step and last operations."""
    simulation = CacheSimulation(random.Random(seed), audit)
    try:
        for _ in range(num_steps):
            simulation.step()
    except BaseException as error:
        error.add_note(f"seed {seed}, step {simulation.num_steps}: {' '.join(simulation.trace[-12:])}")
        raise
    return simulation
