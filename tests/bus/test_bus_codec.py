"""Frames and messages: whatever was sent is what arrives, however the stream is cut."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.bus import codec
from chatcache.config import EngineConfig
from chatcache.errors import ContextTooLong, EngineFault, ModelFolderError
from chatcache.types import BeamSearchParams, EngineHealth, Failed, Finished, GenerateRequest, TokenLogprob, Tokens

COMMANDS: list[codec.Command] = [
    codec.Boot("a:b", EngineConfig(model="x", kv_memory_bytes=1 << 30)),
    codec.Submit(7, GenerateRequest(request_id="r", prompt=(1, 2), params=BeamSearchParams(early_stopping="never"))),
    codec.Abort("r"),
    codec.Ask(3, "stats"),
    codec.Stop(),
]
NOTICES: list[codec.Notice] = [
    codec.Loading(0.5, "weights"),
    codec.LoadFailed(codec.Fault("ModelFolderError", "config.json: missing", "model_folder_error")),
    codec.Answer(3, value={"a": [1, 2]}),
    codec.Events(
        (
            Tokens("r", 1, 0, (5, 6), (TokenLogprob(-0.5, ((5, -0.5),)), TokenLogprob(float("-inf")))),
            Failed("r", 2, "no", param="n"),
            Finished("s", 1, 3, 0, 0),
        ),
        EngineHealth(ready=True),
    ),
]


@pytest.mark.parametrize("message", COMMANDS, ids=lambda message: type(message).__name__)
def test_commands_survive(message: codec.Command) -> None:
    (body,) = codec.FrameBuffer().feed(codec.encode(message))
    assert codec.decode_command(body) == message


@pytest.mark.parametrize("message", NOTICES, ids=lambda message: type(message).__name__)
def test_notices_survive(message: codec.Notice) -> None:
    (body,) = codec.FrameBuffer().feed(codec.encode(message))
    assert codec.decode_notice(body) == message


@given(cuts=st.lists(st.integers(1, 40), max_size=200))
def test_any_cut_of_the_stream_gives_the_same_frames(cuts: list[int]) -> None:
    stream = b"".join(codec.encode(message) for message in COMMANDS)
    frames, bodies, position = codec.FrameBuffer(), [], 0
    for cut in [*cuts, len(stream)]:
        bodies += frames.feed(stream[position : position + cut])
        position += cut
    assert [codec.decode_command(body) for body in bodies] == COMMANDS


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="exceeds the frame limit"):
        codec.encode(codec.Abort("x" * (codec.MAX_FRAME_BYTES + 1)))
    with pytest.raises(ValueError, match="exceeds the limit"):
        codec.FrameBuffer().feed(struct.pack(">I", codec.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "exec"}), codec.encode(NOTICES[0])[4:]])
def test_what_is_no_command_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        codec.decode_command(body)


@pytest.mark.parametrize("error", [ContextTooLong("9 > 8", param="prompt"), ModelFolderError("x: bad", code="other")])
def test_catalogued_errors_survive(error: ContextTooLong | ModelFolderError) -> None:
    back = codec.from_fault(codec.to_fault(error))
    assert (type(back), back.message, back.param, back.code) == (type(error), error.message, error.param, error.code)


def test_other_errors_become_engine_faults() -> None:
    back = codec.from_fault(codec.to_fault(KeyError("k")))
    assert isinstance(back, EngineFault) and "KeyError" in back.message
    assert isinstance(codec.from_fault(codec.Fault("annotations", "m", "c")), EngineFault)
