"""Stop rules: order of causes, bytes against token boundaries."""

from __future__ import annotations

import itertools
import random

import pytest

from chatcache.decoding.stopping import START, StopProgress, StopResult, StopRules
from chatcache.errors import InvalidRequestError
from chatcache.types.events import FINISH_LENGTH, FINISH_STOP


def follow_all(rules: StopRules, tokens: list[int]) -> tuple[int, StopResult | None]:
    """Return how many tokens were taken and why it ended."""
    trail = START
    for place, token in enumerate(tokens, 1):
        trail, ended = rules.advance(trail, token)
        if ended is not None:
            return place, ended
    return len(tokens), None


def splits(text: bytes) -> list[list[bytes]]:
    """Every way to cut `text` into pieces."""
    ways = []
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        ways.append([text[a:b] for a, b in itertools.pairwise(bounds)])
    return ways


@pytest.mark.parametrize(("stop", "text"), [("stop", "a stop!"), ("é中", "xé中y"), ("aab", "aaaab"), ("👩", "a👩")])
def test_found_at_every_split(stop: str, text: str) -> None:
    end = text.encode().index(stop.encode()) + len(stop.encode())
    for pieces in splits(text.encode()):
        rules = StopRules(max_tokens=99, stop_strings=[stop], token_bytes=pieces)
        taken, ended = follow_all(rules, list(range(len(pieces))))
        assert ended == StopResult(FINISH_STOP, stop)
        assert sum(map(len, pieces[: taken - 1])) < end <= sum(map(len, pieces[:taken]))


def test_random_texts_equal_plain_search() -> None:
    rng = random.Random(5)
    pieces = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"bba", b"abab"]
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        tokens = [rng.randrange(len(pieces)) for _ in range(12)]
        min_tokens = rng.choice([0, 0, 4])
        rules = StopRules(max_tokens=99, min_tokens=min_tokens, stop_strings=stops, token_bytes=pieces)
        taken, ended = follow_all(rules, tokens)
        want: tuple[int, str | None] = (12, None)
        for place in range(max(1, min_tokens), 13):
            text, old = b"".join(pieces[t] for t in tokens[:place]), b"".join(pieces[t] for t in tokens[: place - 1])
            hits = [
                (start + len(stop), start, stop)
                for stop in stops
                for start in range(len(text))
                if text.startswith(stop.encode(), start) and start + len(stop) > len(old)
            ]
            if hits:
                want = (place, min(hits)[2])
                break
        assert (taken, ended.stop_reason if ended else None) == want


def test_the_tail_is_bounded() -> None:
    rules = StopRules(max_tokens=9999, stop_strings=["x" * 10], token_bytes=[b"abc"])
    trail = START
    for _ in range(100):
        trail, _ended = rules.advance(trail, 0)
    assert trail == StopProgress(100, b"abcabcabc")


def test_causes_in_order() -> None:
    rules = StopRules(
        max_tokens=3, eos_ids=[1, 2], stop_ids=[2, 3], stop_strings=["s"], token_bytes=[b"x", b"s", b"s", b"s", b"s"]
    )
    trail, ended = rules.advance(START, 0)
    assert ended is None
    assert rules.advance(trail, 1)[1] == StopResult(FINISH_STOP)
    assert rules.advance(trail, 2)[1] == StopResult(FINISH_STOP)
    assert rules.advance(trail, 3)[1] == StopResult(FINISH_STOP, 3)
    assert rules.advance(trail, 4)[1] == StopResult(FINISH_STOP, "s")
    trail, _ = rules.advance(trail, 0)
    assert rules.advance(trail, 0)[1] == StopResult(FINISH_LENGTH)
    assert rules.advance(trail, 1)[1] == StopResult(FINISH_STOP)
    assert rules.advance(trail, 4)[1] == StopResult(FINISH_STOP, "s")


def test_min_tokens_ban_and_stop_strings() -> None:
    rules = StopRules(max_tokens=9, min_tokens=2, eos_ids=[1], stop_ids=[1, 5], stop_strings=["a"], token_bytes=[b"a"])
    assert rules.terminal_ids == (1, 5)
    assert rules.banned_ids(START) == (1, 5)
    trail, ended = rules.advance(START, 0)
    assert ended is None and rules.banned_ids(trail) == (1, 5)
    trail, ended = rules.advance(trail, 0)
    assert ended == StopResult(FINISH_STOP, "a") and rules.banned_ids(trail) == ()


def test_ids_without_bytes_match_nothing() -> None:
    rules = StopRules(max_tokens=9, stop_strings=["ab"], token_bytes=[b"a", b"b"])
    assert follow_all(rules, [0, 77, 1]) == (3, StopResult(FINISH_STOP, "ab"))


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopRules(max_tokens=9, stop_strings=["ab"])
    assert caught.value.param == "stop"
