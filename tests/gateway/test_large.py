"""Large answers: written beside the event loop, the same whichever way they are written."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest

from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished
from chatcache.gateway.api.generation import CompleteReply, collect
from chatcache.types.events import TokenLogprob
from tests.gateway.serving import Server


class Serializer:
    """Records the thread that builds the body."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        raise NotImplementedError

    def body(self, reply: CompleteReply) -> object:
        self.thread = threading.current_thread()
        return {done.index: [delta.text for delta in reply.deltas[done.index]] for done in reply.dones}


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
    assert await collect(events(), serializer) == f'{{"0":{one},"1":{one}}}'.replace("'", '"').replace(" ", "").encode()
    assert (serializer.thread is threading.current_thread()) == on_the_loop


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
