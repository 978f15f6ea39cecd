"""Frames and messages are decoded as they were encoded, in whatever pieces they arrive."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.config import EngineConfig
from chatcache.engine_process import protocol as codec
from chatcache.engine_process import protocol as faults
from chatcache.engine_process import protocol as messages
from chatcache.errors import ContextLengthError, EngineError, ModelFolderError, UnsupportedParameterError
from chatcache.types.events import (
    Beams,
    CacheMiss,
    Failed,
    Finished,
    LiveBeam,
    Started,
    StartReport,
    TokenLogprob,
    Tokens,
)
from chatcache.types.request import MAX_PROMPT_LOGPROBS, MAX_TOP_LOGPROBS, BeamSearchParams, GenerateRequest
from chatcache.types.stats import EngineHealth, ExplainQuery, Explanation, PageAccounts, PageHit

COMMANDS: list[messages.Command] = [
    messages.Boot("a:b", EngineConfig(model="x", kv_memory_bytes=1 << 30)),
    messages.Submit(7, GenerateRequest(request_id="r", prompt=(1, 2), params=BeamSearchParams(early_stopping="never"))),
    messages.Abort("r"),
    messages.Invoke(3, "stats"),
    messages.Explain(4, ExplainQuery((1, 2, 3), "tenant", 2)),
    messages.Stop(),
]
NOTICES: list[messages.Notice] = [
    messages.Loading(0.5, "weights"),
    messages.LoadFailed(faults.ErrorData("ModelFolderError", "config.json: missing", "model_folder_error")),
    messages.Answer(3, value={"a": [1, 2]}),
    messages.ExplainReply(
        4, Explanation(num_tokens=3, num_cached_tokens=2, page_size=16, pages=(PageHit(0, 2, "partial"),))
    ),
    messages.PageAccountsReply(
        5,
        PageAccounts(
            num_pages_in_use=2,
            page_bytes=64,
            requests={"r": 2.0},
            conversations={"": 2.0},
            namespaces={},
            states={"r": 0.5},
        ),
    ),
    messages.Events(
        (
            Started("r", 1, 3, 0, (None, TokenLogprob(-1.0, ((2, -1.0),)))),
            Started("s", 1, 3, 2, report=StartReport(1, CacheMiss("diverged", 2, "the prompt differs", 16))),
            Beams("r", 1, (LiveBeam(3, 0, 17, -0.25),)),
            Tokens("r", 1, 0, (5, 6), (TokenLogprob(-0.5, ((5, -0.5),)), TokenLogprob(float("-inf")))),
            Failed("r", 2, "no", param="n"),
            Finished("s", 1, 3, 0, 0),
        ),
        EngineHealth(ready=True),
    ),
]


@pytest.mark.parametrize("message", COMMANDS, ids=lambda message: type(message).__name__)
def test_commands_are_decoded_as_encoded(message: messages.Command) -> None:
    (body,) = codec.FrameBuffer().feed(codec.encode(message))
    assert codec.decode_command(body) == message


@pytest.mark.parametrize("message", NOTICES, ids=lambda message: type(message).__name__)
def test_notices_are_decoded_as_encoded(message: messages.Notice) -> None:
    (body,) = codec.FrameBuffer().feed(codec.encode(message))
    assert codec.decode_notice(body) == message


@given(cuts=st.lists(st.integers(1, 40), max_size=200))
def test_frame_buffer_fed_in_any_pieces_returns_the_same_frames(cuts: list[int]) -> None:
    stream = b"".join(codec.encode(message) for message in COMMANDS)
    frames, bodies, position = codec.FrameBuffer(), [], 0
    for cut in [*cuts, len(stream)]:
        bodies += frames.feed(stream[position : position + cut])
        position += cut
    assert [codec.decode_command(body) for body in bodies] == COMMANDS


def test_a_frame_over_the_limit_raises_on_both_sides() -> None:
    with pytest.raises(ValueError, match="exceeds the frame limit"):
        codec.encode(messages.Abort("x" * (codec.MAX_FRAME_BYTES + 1)))
    with pytest.raises(ValueError, match="exceeds the limit"):
        codec.FrameBuffer().feed(struct.pack(">I", codec.MAX_FRAME_BYTES + 1))


def notices_of(notice: messages.Notice) -> list[messages.Notice]:
    bodies = codec.FrameBuffer().feed(b"".join(codec.encode_notice(notice)))
    return [codec.decode_notice(body) for body in bodies]


@pytest.mark.parametrize("num_top", [0, 1, MAX_TOP_LOGPROBS])
def test_the_maximum_of_prompt_logprobs_is_sent_in_small_parts(num_top: int) -> None:
    entries = (None, *[TokenLogprob(-1.5, ((2**17, -1.5),) * num_top)] * (MAX_PROMPT_LOGPROBS // (num_top + 1) - 1))
    started, other = Started("r", 1, 1, 0, entries), Failed("s", 1, "no")
    frames = list(codec.encode_notice(messages.Events((other, started), EngineHealth(ready=True))))
    assert max(map(len, frames)) < 200_000, "none takes long to read"
    *parts, events = [codec.decode_notice(body) for body in codec.FrameBuffer().feed(b"".join(frames))]
    assert events == messages.Events((other, Started("r", 1, 1, 0)), EngineHealth(ready=True))
    assert all(isinstance(part, messages.PromptScores) and part.request_id == "r" for part in parts)
    assert codec.decode_scores(part.part for part in parts if isinstance(part, messages.PromptScores)) == entries


def test_events_over_one_frame_are_split_in_order_with_the_health_last() -> None:
    events = tuple(Failed("r", seq, "x" * (codec.MAX_FRAME_BYTES // 4)) for seq in range(1, 8))
    parts = notices_of(messages.Events(events, EngineHealth(ready=True)))
    assert all(isinstance(part, messages.Events) for part in parts)
    assert sum((part.events for part in parts if isinstance(part, messages.Events)), ()) == events
    sent = [part.health is not None for part in parts if isinstance(part, messages.Events)]
    assert len(sent) > 1 and sent == [False] * (len(sent) - 1) + [True]


def test_an_answer_over_one_frame_becomes_an_error() -> None:
    (answer,) = notices_of(messages.Answer(9, value="x" * codec.MAX_FRAME_BYTES))
    assert isinstance(answer, messages.Answer) and answer.call == 9
    assert answer.error is not None and "too large" in answer.error.message


@pytest.mark.parametrize(
    ("body", "call"), [(b"\xc1", None), (msgspec.msgpack.encode({"type": "?", "call": 4}), 4), (b"\x90", None)]
)
def test_call_id_of_an_invalid_command_is_found_if_present(body: bytes, call: int | None) -> None:
    assert codec.call_id_of(body) == call


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "exec"}), codec.encode(NOTICES[0])[4:]])
def test_an_invalid_command_raises(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        codec.decode_command(body)


@pytest.mark.parametrize(
    "error", [ContextLengthError("9 > 8", param="prompt"), ModelFolderError("x: bad", code="other")]
)
def test_known_errors_are_decoded_as_encoded(error: ContextLengthError | ModelFolderError) -> None:
    back = faults.decode_error(faults.encode_error(error))
    assert (type(back), back.message, back.param, back.code) == (type(error), error.message, error.param, error.code)


def test_unknown_errors_become_engine_errors() -> None:
    back = faults.decode_error(faults.encode_error(KeyError("k")))
    assert isinstance(back, EngineError) and "KeyError" in back.message
    for kind in ("annotations", "ChatcacheError", "__builtins__"):
        assert isinstance(faults.decode_error(faults.ErrorData(kind, "m", "c")), EngineError)


def test_an_error_subclass_is_sent_as_its_nearest_known_class() -> None:
    class NoSuchGrammarError(UnsupportedParameterError):
        pass

    back = faults.decode_error(faults.encode_error(NoSuchGrammarError("no", param="grammar")))
    assert (type(back), back.param) == (UnsupportedParameterError, "grammar")
