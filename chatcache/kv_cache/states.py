"""The states of recurrent and convolution layers: one slot per branch, and snapshots named by their tokens.

The layers that keep no tokens keep a fixed number of bytes per branch, its state, which every step updates in place:

    zero      slot 0: the state before the first token. It is never written; a branch that computes its first token
              gets a copy
    live      the state of one branch. The branches of a fork share it until one of them computes a token: that one gets
              a copy, and the last holder writes in place
    snapshot  a state that stands for exactly the tokens of its name, and can be matched: idle if no table holds it

A name is the key of the last full page and the tokens after it. So it follows the same chain as the pages, scope
included, and a snapshot can be taken at any token. A state cannot be rewound: a table that keeps fewer tokens than its
state has consumed goes back to the last snapshot before, or to the zero state, and computes the tokens after it again.

Budget: at most `max_live` tables are open (the scheduler has no more rows), and at most `max_in_flight` slots serve
nothing but the snapshots of the step being planned. Together they are all slots, so that a table always gets its state.
A snapshot that finds no slot is not taken, and a table on a snapshot that cannot be kept writes it in place.

Eviction, when no slot is blank: of the NUM_COMPARED least recently used idle snapshots, the one that costs least to
compute again, by the number of tokens since the snapshot before it. So the only way into a long history outlives
snapshots that are close to others.

The states of a request that is swapped out travel with its pages: host states are snapshots that it holds until all its
branches run again. A match on one loads it into a slot of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from chatcache.kv_cache.page_hash import TOKEN_BYTES, PageHashChain
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError, PagePool

ZERO_STATE = 0
NUM_COMPARED = 8
SNAPSHOT_INTERVAL = 1024


class SnapshotName(NamedTuple):
    """What a snapshot stands for: the key of the last full page, and the tokens after it (little-endian int32)."""

    parent: bytes
    tail: bytes


class PendingSave(NamedTuple):
    """A snapshot that the step takes of a table's state when it has computed the table's first `num_tokens` tokens."""

    table: PageTable
    num_tokens: int


class HostStates:
    """Snapshots in host memory, and the copies to and from them that the next step makes.

    Host states are numbered from 0. In a match, host state h is the number -1 - h.
    """

    def __init__(self, num_states: int) -> None:
        self.refs = [0] * num_states  # holders: preempted requests, and the step that reads the slot
        self.swaps_out: dict[int, int] = {}  # state by host state
        self.swaps_in: dict[int, int] = {}  # host state by state
        self._blank = list(range(num_states - 1, -1, -1))
        self._names: list[SnapshotName | None] = [None] * num_states
        self._index: dict[bytes, dict[bytes, int]] = {}

    @property
    def num_in_use(self) -> int:
        return len(self.refs) - len(self._blank)

    def snapshots(self, parent: bytes) -> dict[bytes, int]:
        """Return the host states after page `parent` by the tokens after it."""
        return self._index.get(parent, {})

    def store(self, state: int, name: SnapshotName) -> int | None:
        """Retain a host state with this name, to which `state` is copied in this step; None if none is free."""
        host_state = self._index.get(name.parent, {}).get(name.tail)
        if host_state is None:
            if not self._blank:
                return None
            host_state = self._blank.pop()
            self.swaps_out[host_state] = state
            self._names[host_state] = name
            self._index.setdefault(name.parent, {})[name.tail] = host_state
        self.refs[host_state] += 1
        return host_state

    def load(self, state: int, host_state: int) -> None:
        """Fill a newly allocated state from the host in this step."""
        self.refs[host_state] += 1
        self.swaps_in[state] = host_state

    def cancel_load(self, state: int) -> None:
        if (host_state := self.swaps_in.pop(state, None)) is not None:
            self.release([host_state])

    def release(self, host_states: Iterable[int]) -> None:
        for host_state in host_states:
            self.refs[host_state] -= 1
            if not self.refs[host_state]:
                self.unname(host_state)
                self.swaps_out.pop(host_state, None)
                self._blank.append(host_state)

    def unname(self, host_state: int) -> None:
        """Remove a host state from the index, so that it cannot be matched."""
        name, self._names[host_state] = self._names[host_state], None
        if name is not None:
            del self._index[name.parent][name.tail]
            if not self._index[name.parent]:
                del self._index[name.parent]

    def end_step(self, *, is_executed: bool) -> None:
        """Forget the copies of a step; what was to be copied to the host by a failed one cannot be matched."""
        for host_state in () if is_executed else list(self.swaps_out):
            self.unname(host_state)
        self.swaps_out.clear()
        for state in list(self.swaps_in):
            self.cancel_load(state)


class StatePool:
    """The state slots: reference counts, the index of snapshots, and the copies that the next step makes.

    `interval`: snapshots are taken at multiples of so many tokens.
    """

    def __init__(self, num_states: int, num_host_states: int = 0, interval: int = SNAPSHOT_INTERVAL) -> None:
        if num_states < 2:
            raise ValueError(f"num_states must be at least 2 (state 0 is the zero state), got {num_states}")
        self.num_states = num_states
        self.interval = interval
        self.host = HostStates(num_host_states)
        self.max_in_flight = self.num_usable // 4
        self.max_live = self.num_usable - self.max_in_flight
        self.refs = [0] * num_states  # holders: tables, and the step that reads or writes the slot
        self.num_evictions = 0
        self.num_copies = 0
        self.num_saves = 0
        self._blank = list(range(num_states - 1, ZERO_STATE, -1))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()  # snapshots without holder, least recently used first
        self._names: list[SnapshotName | None] = [None] * num_states
        self._costs = [0] * num_states
        self._index: dict[bytes, dict[bytes, int]] = {}  # snapshots by parent and tail
        self._copies: dict[int, int] = {}  # source by target
        self._saves: dict[int, PendingSave] = {}  # by target
        self._sources: set[int] = set()  # of copies, retained until the step is over

    @property
    def num_usable(self) -> int:
        return self.num_states - 1

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_in_use(self) -> int:
        return self.num_usable - len(self._blank) - len(self._idle)

    @property
    def num_shared(self) -> int:
        """Number of states that several tables hold."""
        return sum(self._num_holders(state) > 1 for state in range(1, self.num_states))

    @property
    def num_snapshots(self) -> int:
        return sum(map(len, self._index.values()))

    def blank_states(self) -> list[int]:
        """Return the states that no table holds and that are no snapshots."""
        return list(self._blank)

    def snapshots(self) -> Iterator[tuple[SnapshotName, int]]:
        """Yield the name and the state of each snapshot."""
        return ((name, state) for state, name in enumerate(self._names) if name is not None)

    # -- matching -------------------------------------------------------------------------------------------------

    def find(self, parent: bytes, tokens: bytes) -> tuple[int, int] | None:
        """Find the longest snapshot after page `parent` whose tokens begin `tokens`: (number of its bytes, state).

        A host state is returned as a negative number.
        """
        snapshots = self._index.get(parent, {})
        lengths = [(len(tail), state) for tail, state in snapshots.items() if tokens.startswith(tail)]
        hosts = self.host.snapshots(parent)
        lengths += [(len(tail), -1 - host) for tail, host in hosts.items() if tokens.startswith(tail)]
        return max(lengths, default=None)

    def last_in_chain(self, chain: PageHashChain, num_tokens: int) -> tuple[int, int]:
        """Find the last snapshot within the first `num_tokens` tokens of a prompt: (its number of tokens, state)."""
        size, stop = chain.page_bytes, num_tokens * TOKEN_BYTES
        pages = ((i, chain.parents[i], chain.data[i * size : min((i + 1) * size, stop)]) for i in _down(stop // size))
        return self._last(pages, size)

    def last_in_table(self, pool: PagePool, table: PageTable, num_tokens: int, page_size: int) -> tuple[int, int]:
        """Find the last snapshot within the first `num_tokens` tokens of a table: (its number of tokens, state)."""
        return self._last(_table_pages(pool, table, num_tokens, page_size), page_size * TOKEN_BYTES)

    def _last(self, pages: Iterator[tuple[int, bytes, bytes]], page_bytes: int) -> tuple[int, int]:
        for index, parent, tokens in pages:
            found = self.find(parent, tokens)
            if found is not None:
                return (index * page_bytes + found[0]) // TOKEN_BYTES, found[1]
        return 0, ZERO_STATE

    # -- the states of tables -------------------------------------------------------------------------------------

    def retain(self, state: int) -> None:
        """Add one reference to a state, except to the zero state."""
        if state == ZERO_STATE:
            return
        if not self.refs[state]:
            if state not in self._idle:
                raise InvariantError(f"state {state} was retained, but it has no holder and is not idle")
            del self._idle[state]
        self.refs[state] += 1

    def release(self, state: int) -> None:
        """Remove one reference from a state; a snapshot without holders stays matchable, other states become blank."""
        if state == ZERO_STATE:
            return
        self.refs[state] -= 1
        if self.refs[state] < 0:
            raise InvariantError(f"state {state} was released more often than held")
        if not self.refs[state]:
            self._copies.pop(state, None)
            self.host.cancel_load(state)
            if self._names[state] is None:
                self._blank.append(state)
            else:
                self._idle[state] = None

    def assign(self, table: PageTable, state: int, num_tokens: int) -> None:
        """Replace the state of a table by the one of its first `num_tokens` tokens, perhaps loaded from the host."""
        if state < ZERO_STATE:
            host_state, state = -1 - state, self._allocate()
            self.host.load(state, host_state)
        else:
            self.retain(state)
        self.release(table.state)
        table.state, table.num_state_tokens, table.num_snapshot_tokens = state, num_tokens, num_tokens

    def is_writable(self, table: PageTable) -> bool:
        """Return whether the next token can be computed in the table's state without a copy."""
        state = table.state
        is_exact = table.num_state_tokens == table.num_tokens
        return is_exact and state != ZERO_STATE and self._num_holders(state) == 1 and self._names[state] is None

    def reserve(self, tables: Iterable[PageTable]) -> None:
        """Give each table, which is about to compute tokens, a state of its own; the step makes the copies."""
        for table in tables:
            state = table.state
            if state != ZERO_STATE and self._num_holders(state) == 1:
                if self._names[state] is None:
                    continue
                if self._num_in_flight >= self.max_in_flight:
                    self._unname(state)
                    continue
            target = self._allocate()
            if state != ZERO_STATE:
                if state not in self._sources:
                    self._sources.add(state)
                    self.retain(state)
                self.release(state)
            self._copies[target] = state
            table.state = target
            self.num_copies += 1

    def save(self, table: PageTable, num_tokens: int) -> None:
        """Take a snapshot of a table's state after the step, which computes its tokens up to `num_tokens`."""
        if self._num_in_flight < self.max_in_flight:
            self._saves[self._allocate()] = PendingSave(table, num_tokens)

    def close(self, table: PageTable, *, keep: bool) -> None:
        """Release the state of a table that is being closed.

        With `keep` it becomes a snapshot of the table's tokens, unless it has consumed others: a row on the device may
        be ahead of the table.
        """
        state = table.state
        if keep and self._is_exact(table) and self._num_holders(state) == 1:
            self._name(state, table)
        self.release(state)
        table.state = ZERO_STATE

    def swap_out(self, tables: Iterable[PageTable]) -> list[int]:
        """Copy the states of tables to the host in this step; return the retained host states.

        As many as are free; the others are computed again.
        """
        exact = [table for table in tables if self._is_exact(table)]
        stored = [self.host.store(table.state, SnapshotName(table.key, table.tail_tokens)) for table in exact]
        return [host_state for host_state in stored if host_state is not None]

    def _is_exact(self, table: PageTable) -> bool:
        """Return whether a table's state has consumed exactly the table's tokens, and is not filled by this step."""
        state = table.state
        is_pending = state in self._copies or state in self.host.swaps_in
        return state != ZERO_STATE and table.num_state_tokens == table.num_tokens and not is_pending

    def forget(self, parent: bytes, num_kept_bytes: int = -1) -> None:
        """Remove the snapshots after page `parent`, but those with at most so many bytes of tokens after it."""
        for tail, state in list(self._index.get(parent, {}).items()):
            if len(tail) > num_kept_bytes:
                self._unname(state)
        for tail, host_state in list(self.host.snapshots(parent).items()):
            if len(tail) > num_kept_bytes:
                self.host.unname(host_state)

    def unname_all(self) -> None:
        """Remove all snapshots, so that none can be matched."""
        for parent in [*self._index, *self.host._index]:
            self.forget(parent)

    def _num_holders(self, state: int) -> int:
        """Count the tables that hold a state."""
        return self.refs[state] - (state in self._sources)

    @property
    def _num_in_flight(self) -> int:
        """Number of slots that only the step being planned holds."""
        return len(self._saves) + sum(1 for state in self._sources if self.refs[state] == 1)

    def _allocate(self) -> int:
        if self._blank:
            state = self._blank.pop()
        else:
            state = min(islice(self._idle, NUM_COMPARED), key=self._costs.__getitem__, default=ZERO_STATE)
            if state == ZERO_STATE:
                raise InvariantError("no state is free: more tables are open than the states allow")
            self._unname(state)
            self._blank.remove(state)
            self.num_evictions += 1
        self.refs[state] = 1
        return state

    def _name(self, state: int, table: PageTable) -> None:
        """Make a state a snapshot of the table's tokens, unless there is one."""
        name = SnapshotName(table.key, table.tail_tokens)
        snapshots = self._index.setdefault(name.parent, {})
        if (other := snapshots.get(name.tail)) is not None:
            if other in self._idle:
                self._idle.move_to_end(other)
            return
        snapshots[name.tail] = state
        self._names[state] = name
        self._costs[state] = table.num_tokens - table.num_snapshot_tokens
        table.num_snapshot_tokens = table.num_tokens

    def _unname(self, state: int) -> None:
        name = self._names[state]
        if name is None:
            return
        self._names[state] = None
        snapshots = self._index[name.parent]
        del snapshots[name.tail]
        if not snapshots:
            del self._index[name.parent]
        if state in self._idle:
            del self._idle[state]
            self._blank.append(state)

    # -- the step -------------------------------------------------------------------------------------------------

    def pending_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies of states before the step's rows and after them, as (source, target)."""
        saves = [(save.table.state, target) for target, save in self._saves.items() if save.table.state != ZERO_STATE]
        return [(source, target) for target, source in self._copies.items()], saves

    def pending_swaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies of states to the host, as (state, host state), and from it, as (host state, state)."""
        outs = [(state, host_state) for host_state, state in self.host.swaps_out.items()]
        return outs, [(host_state, state) for state, host_state in self.host.swaps_in.items()]

    def complete_step(self) -> None:
        """Name the snapshots of an executed step, whose tables are committed."""
        self.host.end_step(is_executed=True)
        for target, save in self._saves.items():
            if save.table.num_tokens == save.num_tokens:
                self._name(target, save.table)
                self.num_saves += 1
        self.abort_step()

    def abort_step(self) -> None:
        """Forget the copies and the snapshots of a step that was not executed."""
        self.host.end_step(is_executed=False)
        states = [*self._saves, *self._sources]
        self._saves.clear()
        self._sources.clear()
        self._copies.clear()
        for state in states:
            self.release(state)

    # -- checks ---------------------------------------------------------------------------------------------------

    def violations(self, tables: Iterable[PageTable]) -> Iterator[str]:
        """Yield the violated invariants, given all open tables; a launched step may hold states, too."""
        num_holders = [0] * self.num_states
        for state in (*self._saves, *self._sources):
            num_holders[state] += 1
        for table in tables:
            num_holders[table.state] += 1
            name = self._names[table.state]
            if name is not None and name.tail != table.tail_tokens:
                yield f"state {table.state} is a snapshot of other tokens than those of its table"
        blank, named = set(self._blank), {s for snapshots in self._index.values() for s in snapshots.values()}
        if len(blank) != len(self._blank) or ZERO_STATE in blank or ZERO_STATE in self._idle or self.refs[ZERO_STATE]:
            yield "a state is blank twice, or the zero state is in circulation"
        for state in range(1, self.num_states):
            if self.refs[state] != num_holders[state]:
                yield f"state {state} counts {self.refs[state]} holders and has {num_holders[state]}"
            is_blank, is_idle = state in blank, state in self._idle
            if is_blank + is_idle != (not self.refs[state]):
                yield f"state {state} has {self.refs[state]} holders, blank={is_blank}, idle={is_idle}"
            if (self._names[state] is not None) != (state in named) or (is_idle and state not in named):
                yield f"state {state} is not in the index under its name"


def _down(last: int) -> range:
    return range(last, -1, -1)


def _table_pages(
    pool: PagePool, table: PageTable, num_tokens: int, page_size: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (index, key of the page before, tokens) of a table's pages up to `num_tokens`, the last one first."""
    for index in _down(num_tokens // page_size):
        parent, tokens = table.key, table.tail_tokens
        if index < table.num_tokens // page_size:
            content = pool.content(table.page_at(index))
            if content is None:
                raise InvariantError(f"table entry {index} is full but the contents of its page are not recorded")
            parent, tokens = content.parent, content.tokens
        yield index, parent, tokens[: (num_tokens - index * page_size) * TOKEN_BYTES]
