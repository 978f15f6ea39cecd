"""A shared last page: copy on write, or leave it and begin a fresh page. Formulas, and trials on the real `KVCache`.

A fork leaves two branches that share a partly filled last page of P tokens. With copies, a branch that writes to it
gets its own copy, and continues in it. With fresh pages nothing is copied: each branch continues in a new page, and the
rest of the shared page stays empty.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

import numpy as np

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_table import PageTable
from loadtest.studies.results import REAL, Context, Panel, Row, Series, StudyResult

PAGE = 16
PROBABILITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
WIDTHS = (2, 3, 4, 6, 8)


def page_fill(q: float, page_size: int = PAGE) -> float:
    """Return the tokens that a fresh page gets when its branch forks again with probability q per token."""
    return (1 - (1 - q) ** page_size) / q


def copy_share(page_size: int = PAGE) -> float:
    """Return the share of forks whose last page is partly filled, at a random length."""
    return (page_size - 1) / page_size


def extra_pages(num_branches: int, page_size: int = PAGE) -> float:
    """Return the pages of one fork with fresh pages minus those with copies, at random lengths.

    Fresh pages store the shared tail once, and start each branch on a page boundary.
    """
    return copy_share(page_size) * (1 - num_branches / 2)


@dataclass(slots=True)
class Trial:
    """Branches on a real `KVCache`. With `fresh` a fork first fills up the last page, so nothing is left to copy."""

    kv: KVCache
    fresh: bool
    num_forks: int = 0
    num_copies: int = 0

    def write(self, table: PageTable, num_tokens: int) -> None:
        """Append tokens, as a step does."""
        copies = self.kv.reserve([(table, table.num_tokens + num_tokens)])
        if copies is None:
            raise MemoryError("the pool is too small for this trial")
        self.num_copies += len(copies)
        self.kv.commit(table, np.zeros(num_tokens, "<i4").tobytes())
        self.kv.complete_step()

    def fork(self, table: PageTable) -> PageTable:
        self.num_forks += 1
        if self.fresh and table.num_tokens % PAGE:
            self.write(table, -table.num_tokens % PAGE)
        return self.kv.fork(table)


def _new_trial(fresh: bool, num_pages: int) -> tuple[Trial, PageTable]:
    kv = KVCache(num_pages, PAGE, enable_prefix_caching=False)
    return Trial(kv, fresh), kv.open(kv.empty_match())


def trial_of_repeated_forks(q: float, num_tokens: int, fresh: bool, seed: int) -> tuple[int, Trial]:
    """Return the pages of a branch that forks with probability q after each token.

    Both branches write the next token, then one of them ends, as in a beam search.
    """
    rng = random.Random(seed)
    trial, table = _new_trial(fresh, 4 * num_tokens)
    for _ in range(num_tokens):
        trial.write(table, 1)
        if rng.random() < q:
            child = trial.fork(table)
            trial.write(child, 1)
            trial.kv.truncate(child, child.num_tokens - 1)  # its own token is written in the next round
            trial.kv.close(table)
            table = child
    return trial.kv.pool.num_in_use, trial


def trial_of_one_fork(num_branches: int, fresh: bool, rng: random.Random) -> int:
    """Return the pages of a prompt of random length and its branches, each of them with as many further tokens."""
    trial, table = _new_trial(fresh, 1000)
    trial.write(table, rng.randrange(4 * PAGE, 8 * PAGE))
    output = rng.randrange(PAGE, 3 * PAGE)
    branches = [table, *(trial.fork(table) for _ in range(num_branches - 1))]
    for branch in branches:
        trial.write(branch, output)
    return trial.kv.pool.num_in_use


def run_tails(context: Context) -> StudyResult:
    """Count copies and pages of both policies, in formulas and in trials on the real `KVCache`."""
    num_tokens, num_trials = context.pick(20_000, 4_000), context.pick(4_000, 500)
    factors, copied = [], 0.0
    for number, q in enumerate(PROBABILITIES):
        copies, copying = trial_of_repeated_forks(q, num_tokens, False, number)
        fresh, _ = trial_of_repeated_forks(q, num_tokens, True, number)
        factors.append(fresh / copies)
        copied = copying.num_copies / copying.num_forks if q == 0.05 else copied
        context.advance(0.5 / len(PROBABILITIES))
    extra = []
    for width in WIDTHS:
        pages = [
            statistics.fmean(trial_of_one_fork(width, fresh, rng) for _ in range(num_trials))
            for fresh, rng in ((True, random.Random(width)), (False, random.Random(width)))
        ]
        extra.append(pages[0] - pages[1])
        context.advance(0.5 / len(WIDTHS))
    theory = [PAGE / page_fill(q) for q in PROBABILITIES]
    at = PROBABILITIES.index(0.1)
    kinds = (("formula", theory), ("trials on the real KVCache", factors))
    rows = [Row("tails", "forks that copy a page (formula: 15/16)", copied, copy_share(), "", REAL)]
    rows += [
        Row(
            "tails",
            f"pages, fresh / copied, a fork with q = {q} per token (formula {formula:.3f})",
            value,
            None,
            "x",
            REAL,
        )
        for q, formula, value in zip(PROBABILITIES, theory, factors, strict=True)
    ]
    rows += [
        Row("tails", f"pages, fresh - copied, one fork into {width} (formula {extra_pages(width):.3f})", value, None,
            "pages", REAL)
        for width, value in zip(WIDTHS, extra, strict=True)
    ]  # fmt: skip
    return StudyResult(
        name="tails",
        title=f"A shared last page of {PAGE} tokens: copy on write, or leave it and begin a fresh page",
        question="Copy a shared last page, or abandon it?",
        answer=f"It depends on how often a branch forks. {100 * copied:.1f} % of the forks copy one page (formula: "
        f"15/16, since one length in {PAGE} ends with its page). One fork into n sequences takes fewer pages without "
        f"copies, (P-1)/P x (n/2 - 1) fewer by the formula and {-extra[-1]:.2f} fewer for {WIDTHS[-1]} sequences in "
        "trials, because the shared tail is stored once. But each further fork leaves another page partly empty: at "
        f"a fork with probability 0.1 per token, as in a beam search, a page gets {page_fill(0.1):.1f} of {PAGE} "
        f"tokens and a branch takes {factors[at]:.2f} times the pages (formula: {theory[at]:.2f}). The engine "
        "copies: one page of copying per fork costs less than the worst case of the other policy.",
        rows=tuple(rows),
        panels=(
            Panel(
                title="repeated forks, one branch goes on", x_label="probability of a fork per token", log_x=True,
                y_label="pages, fresh / copied", limit=(1.0, "as many"), y_min=0,
                series=tuple(Series(name, PROBABILITIES, tuple(values)) for name, values in kinds),
            ),
            Panel(
                title="one fork", x_label="sequences after the fork", y_label="pages, fresh - copied",
                limit=(0.0, "as many"),
                series=(
                    Series("formula", WIDTHS, tuple(map(extra_pages, WIDTHS))),
                    Series("trials on the real KVCache", WIDTHS, tuple(extra)),
                ),
            ),
        ),
    )  # fmt: skip
