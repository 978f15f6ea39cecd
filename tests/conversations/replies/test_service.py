"""Replies over the hash model: text equals the decoder's, ids stand for their text, leaving early frees pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.config import EngineConfig
from chatcache.conversations.prompt import Message
from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.parser import ReplyContext
from chatcache.conversations.replies.service import Candidate, ChatService, Reply, ReplyFailedError
from chatcache.engine.engine import Engine
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import CandidateDone, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.gateway.serving import tiny_tokenizer
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

USER = [Message(role="user", content="Hello")]


class Rig:
    """A reply service over an engine in a thread."""

    def __init__(self, engine_seed: int = 0) -> None:
        tokenizer, config = tiny_tokenizer(), EngineConfig(seed=engine_seed)
        eos = tokenizer.eos_token_ids
        self.runner = FakeRunner(fake_capacity(1024, 4, max_model_len=1024), tokenizer.vocab_size, eos[0])
        model_info = fake_model_info(tokenizer.vocab_size, eos, 1024)
        self.engine = ThreadedEngine(lambda: Engine(self.runner, model_info, config, tokenizer.token_bytes))
        self.service = ChatService(self.engine, tokenizer)
        self._number = 0

    async def start(self, params: Params, messages: list[Message] | None = None) -> Reply:
        prompt = await self.service.prompt(messages or USER, "")
        self._number += 1
        request = GenerateRequest(request_id=f"r{self._number}", prompt=prompt.token_ids, params=params)
        return await self.service.start(request, prompt.text)

    async def ask(self, params: Params, messages: list[Message] | None = None) -> list[ReplyEvent]:
        async with await self.start(params, messages) as reply:
            return [event async for event in reply.events()]

    async def pages_in_use(self) -> int:
        stats = await self.engine.stats()
        return int(stats.num_in_use)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with rig.engine:
        yield rig
        async with asyncio.timeout(60):
            while await rig.pages_in_use():  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.01)


PARAMS: dict[str, Params] = {
    "greedy": SamplingParams(temperature=0, max_tokens=30),
    "n": SamplingParams(n=4, seed=1, max_tokens=40),
    "logprobs": SamplingParams(n=2, seed=2, max_tokens=30, logprobs=2),
    "cut": SamplingParams(seed=3, max_tokens=3, ignore_eos=True),
    "special tokens shown": SamplingParams(seed=4, max_tokens=60, skip_special_tokens=False),
    "stop ids": SamplingParams(seed=4, max_tokens=300, ignore_eos=True, stop_token_ids=tuple(range(40, 60))),
    "beams": BeamSearchParams(beam_width=3, max_tokens=8),
}


@pytest.mark.parametrize("name", PARAMS)
async def test_reply_events_equal_the_decoded_tokens(rig: Rig, name: str) -> None:
    params = PARAMS[name]
    events = await rig.ask(params)
    assert isinstance(events[0], ReplyStarted) and isinstance(events[-1], ReplyFinished)
    dones = {event.index: event for event in events if isinstance(event, ReplyDone)}
    assert len(dones) == (params.n or 3)
    terminal = {*params.stop_token_ids, *(() if params.ignore_eos else tiny_tokenizer().eos_token_ids)}
    for index, done in dones.items():
        deltas = [event for event in events if isinstance(event, ReplyDelta) and event.index == index]
        ids = done.token_ids[:-1] if done.token_ids[-1] in terminal else done.token_ids
        assert "".join(delta.text for delta in deltas) == done.text
        assert done.text == tiny_tokenizer().decode(ids, skip_special_tokens=params.skip_special_tokens)
        assert tuple(token for delta in deltas for token in delta.token_ids) == done.stored_ids == ids
        if params.logprobs is not None:
            assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert events.index(deltas[-1]) < events.index(done) if deltas else True
    assert events[-1].num_output_tokens == sum(len(done.token_ids) for done in dones.values())


async def test_unseeded_request_draws_the_same_on_engines_with_other_seeds() -> None:
    async def draw(engine_seed: int) -> list[tuple[int, ...]]:
        rig = Rig(engine_seed)
        async with rig.engine:
            events = await rig.ask(SamplingParams(n=2, max_tokens=12, ignore_eos=True))
            return [event.token_ids for event in events if isinstance(event, ReplyDone)]

    first = await draw(0)
    assert first[0] != first[1] and await draw(1) == first


@settings(deadline=None)
@given(
    st.lists(st.integers(4, tiny_tokenizer().vocab_size - 1), min_size=1, max_size=30),
    st.integers(0, 40),
    st.integers(1, 4),
    st.booleans(),
)
def test_candidate_stored_ids_decode_to_exactly_the_visible_text(
    ids: list[int], at: int, length: int, include: bool
) -> None:
    """Cut the text at any stop string: the stored ids decode to the visible text."""
    tokenizer = tiny_tokenizer()
    stop = tokenizer.decode(ids)[at : at + length]
    if not stop or "\ufffd" in stop:
        return
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include, ignore_eos=True)
    candidate = Candidate(0, ReplyContext(tokenizer), GenerateRequest(request_id="r", prompt=(5,), params=params))
    for token in ids:
        candidate.push(Tokens("r", 1, 0, (token,)))
    done = candidate.finish(CandidateDone("r", 2, 0, "stop", stop))[-1]
    assert isinstance(done, ReplyDone)
    assert tokenizer.decode(done.stored_ids) == done.text
    if not include:
        assert stop not in done.text
    else:
        assert done.text.endswith(stop) or stop not in done.text


async def test_service_resent_history_reuses_the_stored_tokens(rig: Rig) -> None:
    params = SamplingParams(seed=9, max_tokens=25)
    first = await rig.ask(params)
    done = next(event for event in first if isinstance(event, ReplyDone))
    messages = [*USER, Message(role="assistant", content=f"{done.text}\n"), Message(role="user", content="And?")]
    prompt = await rig.service.prompt(messages, "")
    assert prompt.base_message == 1
    other_tenant = await rig.service.prompt(messages, "other")
    assert other_tenant.base_message is None


async def test_reply_cancel_emits_the_text_so_far(rig: Rig) -> None:
    rig.runner.delay_s = 0.01
    async with await rig.start(SamplingParams(n=2, max_tokens=200, ignore_eos=True)) as reply:
        events: list[ReplyEvent] = []
        async for event in reply.events():
            events.append(event)
            if len(events) == 8:
                await reply.cancel()
    assert isinstance(events[-1], ReplyFinished)
    assert events[-1].cancelled and events[-1].num_pages_freed > 0
    dones = [event for event in events if isinstance(event, ReplyDone)]
    assert [done.finish_reason for done in dones] == ["cancelled"] * 2
    for done in dones:
        texts = [event.text for event in events if isinstance(event, ReplyDelta) and event.index == done.index]
        assert "".join(texts) == done.text == tiny_tokenizer().decode(done.token_ids)


async def test_reply_left_early_is_aborted_and_may_be_closed_twice(rig: Rig) -> None:
    rig.runner.delay_s = 0.01
    async with await rig.start(SamplingParams(max_tokens=900, ignore_eos=True)) as reply:
        async for _ in reply.events():
            break
    await reply.close()


async def test_reply_of_a_cancelled_task_is_aborted(rig: Rig) -> None:
    rig.runner.delay_s = 0.01
    task = asyncio.create_task(rig.ask(SamplingParams(max_tokens=900, ignore_eos=True)))
    while not await rig.pages_in_use():  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_service_engine_errors_are_raised(rig: Rig) -> None:
    with pytest.raises(InvalidRequestError):
        await rig.ask(SamplingParams(n=0))
    rig.runner.execute = lambda plan: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ReplyFailedError) as caught:
        await rig.ask(SamplingParams(max_tokens=5))
    assert caught.value.status == 500 and "zero" not in caught.value.message


async def test_service_many_short_messages_are_assembled_on_a_thread(rig: Rig) -> None:
    """A template takes time for each message, however short."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    prompt = await rig.service.prompt([Message(role="user", content="")] * 2_000, "")
    turning.cancel()
    assert len(prompt.token_ids) > 2_000 and turns > 3
