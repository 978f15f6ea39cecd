"""One local user: a chat, a regenerated reply, an edited question and two branches, with and without caching."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loadtest.studies.machine import RealModel, RequestLoop, open_model
from loadtest.studies.results import REAL, Context, Panel, Row, Series, StudyResult
from loadtest.studies.simulate import Arrival

SYSTEM_TOKENS = 100
QUESTION_TOKENS = 60
Tokens = tuple[int, ...]


class Turn(NamedTuple):
    """One request: what the user did, the length of its prompt, and what was measured."""

    kind: str
    num_prompt_tokens: int
    num_computed_tokens: int
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Day:
    """What a user does: so many turns in one chat, then the rest. `reply`: tokens of each reply."""

    turns: int
    reply: int

    @property
    def num_requests(self) -> int:
        return self.turns + 6


def run_day(model: RealModel, day: Day, enable_prefix_caching: bool, on_turn: Callable[[], None]) -> list[Turn]:
    """Run a day, one request after the other; each prompt continues the replies that the model generated."""
    rng, found = random.Random(0), list[Turn]()
    loop = RequestLoop(model.engine(enable_prefix_caching=enable_prefix_caching))

    def ask(kind: str, history: Tokens, question: Tokens) -> Tokens:
        outcome, prompt = loop.outcome, history + question
        cached, finishes = outcome.num_cached_tokens, outcome.finishes
        loop.run([Arrival(0.0, prompt, day.reply)])
        num_computed = len(prompt) - (outcome.num_cached_tokens - cached)
        first_ms = 1e3 * (finishes[-1].first_token_s - finishes[-1].arrived_s)
        found.append(Turn(kind, len(prompt), num_computed, first_ms))
        on_turn()
        return prompt + tuple(loop.last_tokens)

    def question() -> Tokens:
        return model.prompt(rng, QUESTION_TOKENS)

    histories = [model.prompt(rng, SYSTEM_TOKENS)]  # before each turn
    for _ in range(day.turns):
        last = question()
        histories.append(ask("turn", histories[-1], last))
    ask("regenerate", histories[-2], last)
    ask("edit", histories[day.turns // 2], question())
    for start in (histories[-3], histories[-3]):
        ask("branch", ask("branch", start, question()), question())
    return found


def measure_days(context: Context, day: Day) -> tuple[list[Turn], list[Turn]]:
    """Return the turns with and without prefix caching."""
    model = open_model(context)
    RequestLoop(model.engine()).run([Arrival(0.0, model.prompt(random.Random(1), 64), 4)])

    def advance() -> None:
        context.advance(0.5 / day.num_requests)

    without = run_day(model, day, False, advance)
    return run_day(model, day, True, advance), without


def run_local_user(context: Context) -> StudyResult:
    """Measure the first token and the computed prompt tokens of one user's day."""
    day = context.pick(Day(turns=20, reply=40), Day(turns=5, reply=8))
    on, off = measure_days(context, day)
    label = open_model(context).label
    computed = [sum(turn.num_computed_tokens for turn in turns) for turns in (on, off)]
    first_ms = [statistics.fmean(turn.first_token_ms for turn in turns) for turns in (on, off)]
    rows = [
        Row("local user", f"prompt tokens computed, cache {name}, {label}", value, None, "tokens", REAL)
        for name, value in zip(("on", "off"), computed, strict=True)
    ]
    for name, turns, mean_ms in (("on", on, first_ms[0]), ("off", off, first_ms[1])):
        rows.append(Row("local user", f"mean time to first token, cache {name}, {label}", mean_ms, None, "ms", REAL))
        for kind in ("regenerate", "edit", "branch"):
            value = statistics.fmean(turn.first_token_ms for turn in turns if turn.kind == kind)
            rows.append(
                Row("local user", f"time to first token, {kind}, cache {name}, {label}", value, None, "ms", REAL)
            )
    numbers = tuple(str(number) if turn.kind == "turn" else _short(turn.kind) for number, turn in enumerate(on, 1))
    places = tuple(range(1, len(on) + 1))
    last = next(turn for turn in reversed(off) if turn.kind == "turn")
    again = next(turn for turn in on if turn.kind == "regenerate")
    return StudyResult(
        name="local_user",
        title=f"One local user: {day.turns} turns, a regenerated reply, an edit and two branches ({label})",
        question="Does prefix reuse help a single local user?",
        answer=f"Yes: of {computed[1]:,} prompt tokens {computed[0]:,} are computed, and the mean time to the first "
        f"token falls from {first_ms[1]:.0f} to {first_ms[0]:.0f} ms on this machine. Without a cache the wait grows "
        f"with the chat, to {last.first_token_ms:.0f} ms at {last.num_prompt_tokens:,} tokens; with it, it follows "
        f"the new tokens. A regenerated reply computes {again.num_computed_tokens} of its prompt tokens, and edits and "
        "branches find everything before the place where they differ.",
        rows=tuple(rows),
        panels=(
            Panel(
                title="time to first token", x_label="request (R: regenerate, E: edit, B: branch)", y_label="ms",
                y_min=0, x_ticks=numbers,
                series=tuple(
                    Series(name, places, tuple(turn.first_token_ms for turn in turns))
                    for name, turns in (("cache off", off), ("cache on", on))
                ),
            ),
            Panel(
                title="prompt tokens computed", x_label="request (R: regenerate, E: edit, B: branch)", y_label="tokens",
                y_min=0, x_ticks=numbers,
                series=tuple(
                    Series(name, places, tuple(float(turn.num_computed_tokens) for turn in turns))
                    for name, turns in (("cache off", off), ("cache on", on))
                ),
            ),
        ),
    )  # fmt: skip


def _short(kind: str) -> str:
    return kind[0].upper()
