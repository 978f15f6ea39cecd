"""Optimised code that runs for every token gives the same output as the plain code."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from math import inf

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from chatcache.conversations.replies.events import (
    CallDelta,
    ReplyDelta,
    ReplyDone,
    ReplyEvent,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.gateway.api.chat_completions import ChatCompletionWriter
from chatcache.gateway.api.generation import CompleteReply, CompletionHead, FastChunks, collect
from chatcache.gateway.api.logprobs import LogprobCopy, PackedLogprobs, chat_logprobs
from chatcache.gateway.json_codec import encode
from chatcache.gateway.json_pieces import PIECE_BYTES, Turns
from chatcache.gateway.metrics import UnlockedHistogram
from chatcache.types.events import TokenLogprob
from tests.gateway.serving import Server, tiny_tokenizer

TEXTS = ["a", ' "quoted" \\ \n', "\ue000", "né 中文 👩‍👩‍👧", "\u2028", '"content":"', "\x00\x1f\x7f"]


@pytest.mark.parametrize("model", ["m", "\ue000", 'a"b\\', "中"])
@pytest.mark.parametrize("text", TEXTS)
def test_fast_chunk_equals_the_encoded_chunk(model: str, text: str) -> None:
    def chunk(index: int, text: str) -> object:
        return {"model": model, "choices": [{"index": index, "delta": {"content": text}, "logprobs": None}]}

    fast = FastChunks(chunk)
    for index in (0, 3, 0):
        assert encode(fast.encode(ReplyDelta(index, text, (1,)))) == encode(chunk(index, text))


def chat_writer(*, with_token_ids: bool) -> ChatCompletionWriter:
    head = CompletionHead("chatcmpl-1", 7, "m", "f")
    return ChatCompletionWriter(head, tiny_tokenizer(), (1, 2), 2, with_usage=True, with_token_ids=with_token_ids)


async def test_stream_of_fast_chunks_equals_the_full_stream() -> None:
    """`with_token_ids` takes the long way; but for the ids both must say the same."""

    async def events() -> AsyncIterator[ReplyEvent]:
        yield ReplyStarted(2, 0)
        for number in range(40):
            yield ReplyDelta(number % 2, random.Random(number).choice(TEXTS), (5,))
        yield ReplyDone(0, "", "stop", None, (5,), (5,))
        yield ReplyDone(1, "", "length", None, (5,), (5,))
        yield ReplyFinished(2, 0, 40)

    short = [json.loads(encode(chunk)) async for chunk in chat_writer(with_token_ids=False).chunks(events())]
    full = [json.loads(encode(chunk)) async for chunk in chat_writer(with_token_ids=True).chunks(events())]
    for chunk in full:
        chunk.pop("prompt_token_ids", None)
        for choice in chunk["choices"]:
            choice.pop("token_ids", None)
    assert short == full


async def test_stream_of_chunks_with_logprobs_leaves_the_event_loop_turns() -> None:
    """The events of a step of many candidates are here at once."""
    entry, num_turns, chunks_by_turn = TokenLogprob(-1.0, ((1, -1.0),) * 20), 0, Counter[int]()

    async def events() -> AsyncIterator[ReplyEvent]:
        yield ReplyStarted(2, 0)
        for number in range(64):
            yield ReplyDelta(number % 2, "x", (5,), (entry,))

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    head = CompletionHead("chatcmpl-1", 7, "m", "f")
    writer = ChatCompletionWriter(head, tiny_tokenizer(), (1, 2), 2, with_logprobs=True)
    counting = asyncio.create_task(count_turns())
    async for _ in writer.chunks(events()):
        chunks_by_turn[num_turns] += 1
    counting.cancel()
    assert chunks_by_turn.total() == 2 + 64 and max(chunks_by_turn.values()) <= 2 + 8


def test_reply_delta_is_an_immutable_value() -> None:
    call = CallDelta(0, "{}", "call_1", "f")
    assert ReplyDelta(0, "a", (1,), (), "thought", (call,)) == ReplyDelta(0, "a", (1,), (), "thought", (call,))
    with pytest.raises(AttributeError):
        ReplyDelta(0, "a", (1,)).text = "b"  # type: ignore[misc]


def test_tally_renders_like_a_prometheus_histogram() -> None:
    bounds = (0.001, 0.0025, 0.5, 1, 2.5)
    registries = CollectorRegistry(), CollectorRegistry()
    library = Histogram("chatcache_x_seconds", "Text.", buckets=bounds, registry=registries[0])
    ours = UnlockedHistogram("x_seconds", "Text.", bounds)
    registries[1].register(ours)
    for value in (0.0, 0.001, 0.0010001, 0.4, 0.5, 1.0, 2.5, 2.6, 1e9):
        library.observe(value)
        ours.observe(value)
    rendered = [
        [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        for registry in registries
    ]
    assert rendered[0] == rendered[1]


class CountedTurns(Turns):
    """Counts the pieces and pauses nothing."""

    def end_piece(self) -> None:
        self.num_pieces += 1


def test_packed_logprobs_return_any_range_in_a_fraction_of_the_memory() -> None:
    """The oracle is the list that is encoded as a whole."""
    tokenizer, draws = tiny_tokenizer(), random.Random(3)
    table = tokenizer.token_bytes
    ids = [draws.randrange(len(table) + 2) for _ in range(1000)]  # the model may have rows beyond the vocabulary
    top = tuple((draws.randrange(len(table)), draws.choice((-draws.random(), -inf))) for _ in range(10))
    scores = [TokenLogprob(-draws.random(), top[: draws.randrange(11)]) for _ in ids]
    expected = chat_logprobs(tokenizer, ids, scores)
    entries, copied, ranges, at = PackedLogprobs(table), PackedLogprobs(table), list[tuple[int, int]](), 0
    tracemalloc.start()
    while at < len(ids):
        until = min(len(ids), at + draws.randrange(4))
        entries.extend(zip(ids[at:until], scores[at:until], strict=True))
        ranges.append((at, until))
        at = until
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    whole = b"".join(entries.read(0, len(entries)))
    assert json.loads(b"[%s]" % whole) == json.loads(encode(expected))
    assert list(entries.scored()) == list(zip(ids, scores, strict=True))
    turns = CountedTurns()
    assert encode(entries.encoded(turns)) == encode(expected)
    assert len(whole) / (2 * PIECE_BYTES) < turns.num_pieces <= len(whole) / PIECE_BYTES
    assert entries.num_bytes < len(whole) / 4 and num_bytes < entries.num_bytes + 100_000
    assert entries.num_json_bytes(0, len(entries)) == pytest.approx(len(whole), rel=0.3)
    for first, last in ranges:
        assert b"".join(entries.read(first, last)) == encode(expected[first:last])[1:-1]
        copied.append_copy(msgspec.convert(entries.copy(first, last), LogprobCopy))
    assert len(copied) == len(ids) and b"".join(copied.read(0, len(ids))) == whole


# Bodies with many log-probabilities


class Serializer:
    """Records the thread that builds the body."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.num_kept = -1

    def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        raise NotImplementedError

    def body(self, reply: CompleteReply) -> object:
        self.thread = threading.current_thread()
        self.num_kept = sum(len(delta.logprobs) for deltas in reply.deltas.values() for delta in deltas)
        return {
            done.index: {
                "texts": [delta.text for delta in reply.deltas[done.index]],
                "logprobs": len(reply.logprobs[done.index]),
            }
            for done in reply.dones
        }


@pytest.mark.parametrize(("num_tokens", "on_the_loop"), [(5, True), (50, False)])
async def test_body_with_many_logprobs_is_encoded_in_a_thread(num_tokens: int, on_the_loop: bool) -> None:
    logprob = TokenLogprob(-1.0, ((1, -1.0),) * 20)

    async def events() -> AsyncIterator[ReplyEvent]:
        for index in (1, 0):
            for _ in range(num_tokens // 2):
                yield ReplyDelta(index, "x", (1,), (logprob,))
            yield ReplyDone(index, "x", "stop", None, (), ())
        yield ReplyFinished(1, 0, num_tokens)

    serializer = Serializer()
    one = ["x"] * (num_tokens // 2)
    body = json.loads(await collect(events(), serializer, [b"x"] * 2))
    assert body == {str(index): {"texts": one, "logprobs": num_tokens // 2} for index in (0, 1)}
    assert (serializer.thread is threading.current_thread()) == on_the_loop
    assert serializer.num_kept == 0, "they are kept packed"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_body_encoded_in_a_thread_equals_the_inline_one(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, object] = {"n": 3, "seed": 4, "temperature": 0.7, "max_tokens": 12, "ignore_eos": True}
    if path.endswith("chat/completions"):
        body |= {"messages": [{"role": "user", "content": "Hi é"}], "logprobs": True, "top_logprobs": 3}
    else:
        body |= {"prompt": "Hi é", "logprobs": 3}
    answers = []
    for limit in (0, 10**9):
        monkeypatch.setattr("chatcache.gateway.api.generation._INLINE_LOGPROBS", limit)
        answers.append(server.post(path, **body)[2]["choices"])
    assert answers[0] == answers[1] and len(answers[0]) == 3 and answers[0][2]["logprobs"]
