"""Events that a beam search emits through the engine before it ends."""

from __future__ import annotations

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.events import Beams, CandidateDone, EngineEvent, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64
PROMPT = tuple(range(1, 21))


def events_of(params: Params) -> list[EngineEvent]:
    engine = Engine(FakeRunner(fake_capacity(), VOCAB), fake_model_info(VOCAB), EngineConfig())
    engine.add(GenerateRequest(request_id="a", prompt=PROMPT, params=params))
    events: list[EngineEvent] = []
    while engine.has_work():
        events += engine.step()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


def tokens_of(events: list[EngineEvent], index: int) -> tuple[int, ...]:
    parts = [event.token_ids for event in events if isinstance(event, Tokens) and event.index == index]
    return tuple(token for part in parts for token in part)


def test_beam_search_reports_live_beams_after_every_step() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True, stream_beams=True)
    events = events_of(params)
    grown = [event for event in events if isinstance(event, Beams)]
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    assert len(grown) == 11, "nothing lives on after the last step"
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for event in grown:
        assert len(event.beams) == 4
        paths |= {beam.node: (*paths[beam.parent], beam.token_id) for beam in event.beams}
    assert all(tokens_of(events, index)[:-1] in paths.values() for index in range(4))


def test_beam_search_emits_the_common_prefix_before_the_end() -> None:
    """The answer equals the plain one, but it is emitted in several events."""
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=60, ignore_eos=True, logprobs=1)
    events = events_of(params)
    pieces = [event for event in events if isinstance(event, Tokens)]
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert len(pieces) > 4 and len(tokens_of(events, 0)) == len(tokens_of(events, 1)) == 60
    last = events[-1]
    assert isinstance(last, Finished) and last.num_output_tokens == 120


def test_distinct_candidates_end_one_after_another() -> None:
    events = events_of(SamplingParams(n=4, distinct=True, seed=3, max_tokens=40))
    ends = [event for event in events if isinstance(event, CandidateDone)]
    assert [end.index for end in ends] == [0, 1, 2, 3]
    assert len({tokens_of(events, index) for index in range(4)}) == 4
    first = [event for event in events if isinstance(event, Tokens) and event.index == 0]
    assert all(len(event.token_ids) == 1 for event in first), "the first is streamed like any sample"
