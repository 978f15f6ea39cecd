"""`AsyncLLM` against `LLM`: streams, concurrency, cancellation and failures."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from chatcache import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from chatcache.decoding.sampling import SamplingStrategy
from chatcache.errors import ContextLengthError, EngineError, InvalidRequestError
from chatcache.llm.outputs import CompletionOutput, RequestOutput

PROMPTS: list[Any] = [[7, 8, 9], "Hello", list(range(30, 95))]
PARAMS: list[Any] = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, seed=1, max_tokens=12, temperature=0.8, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=6),
]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "attention_backend": "reference", "kv_memory": "4MiB"}


@pytest.fixture
async def llm_async(folder: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(folder), **OPTIONS) as llm:
        yield llm


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def check_same(outputs: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    """Compare exactly but for floats, which depend on the requests that share a step with this one."""
    for one, other in zip(outputs, expected, strict=True):
        logprobs, wanted = ([list(row.items()) for row in each.logprobs or ()] for each in (one, other))
        for row, wanted_row in zip(logprobs, wanted, strict=True):
            assert [token for token, _ in row] == [token for token, _ in wanted_row]
            assert [each.logprob for _, each in row] == pytest.approx(
                [each.logprob for _, each in wanted_row], abs=1e-4
            )
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert one.score == pytest.approx(other.score, abs=1e-3)
        floats: dict[str, Any] = {"logprobs": None, "cumulative_logprob": None, "score": 0.0}
        assert dataclasses.replace(one, **floats) == dataclasses.replace(other, **floats)


async def wait_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while (await llm.health()).num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_generate_concurrent_streams_end_with_the_outputs_of_llm(llm_async: AsyncLLM, llm: LLM) -> None:
    streams = await asyncio.gather(
        *(collect(llm_async.generate(prompt, params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True))
    )
    for stream, expected in zip(streams, llm.generate(PROMPTS, PARAMS), strict=True):
        assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
        assert stream[-1].prompt == expected.prompt
        check_same(stream[-1].outputs, expected.outputs)
        for earlier, later in itertools.pairwise(stream):
            for one, other in zip(earlier.outputs, later.outputs, strict=False):
                assert other.token_ids[: len(one.token_ids)] == one.token_ids and other.text.startswith(one.text)
    assert len(streams[0]) >= 20, "one output per token"


async def test_generate_closed_early_aborts_the_request(llm_async: AsyncLLM) -> None:
    async with aclosing(llm_async.generate(PROMPTS[0], LONG)) as stream:
        async for output in stream:
            if output.outputs:
                break
    await wait_idle(llm_async)
    assert (await llm_async.health()).num_output_tokens < 200


async def test_generate_in_a_cancelled_task_aborts_the_request(llm_async: AsyncLLM) -> None:
    started = asyncio.Event()

    async def run() -> None:
        async for output in llm_async.generate(PROMPTS[0], LONG):
            if output.outputs:
                started.set()

    task = asyncio.create_task(run())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_idle(llm_async)
    assert (await llm_async.health()).num_output_tokens < 200
    assert (await collect(llm_async.generate(PROMPTS[0], PARAMS[0])))[-1].finished


async def test_abort_ends_the_stream_with_the_tokens_so_far(llm_async: AsyncLLM) -> None:
    last = None
    async for output in llm_async.generate(PROMPTS[0], LONG, "named"):
        last = output
        if output.outputs and not output.finished:
            await llm_async.abort("named")
    assert last is not None and last.finished and last.request_id == "named"
    assert 0 < len(last.outputs[0].token_ids) < 200


async def test_generate_invalid_or_failing_request_raises_and_others_continue(
    llm_async: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SamplingStrategy.advance

    def advance(self: SamplingStrategy, drawn: Any) -> Any:
        if self._sampler_spec.spec.seed == 7:
            raise EngineError("this request fails")
        return original(self, drawn)

    monkeypatch.setattr(SamplingStrategy, "advance", advance)
    results = await asyncio.gather(
        collect(llm_async.generate([1] * 300)),
        collect(llm_async.generate(PROMPTS[0], SamplingParams(seed=7))),
        collect(llm_async.generate(PROMPTS[0], PARAMS[0])),
        collect(llm_async.generate(PROMPTS[0], priority=1)),
        collect(llm_async.generate(PROMPTS[0], [])),  # type: ignore[arg-type]
        return_exceptions=True,
    )
    assert isinstance(results[0], ContextLengthError)
    assert isinstance(results[1], EngineError) and "this request fails" in str(results[1])
    assert isinstance(results[2], list) and len(results[2][-1].outputs[0].token_ids) == 20
    assert isinstance(results[3], InvalidRequestError) and "scheduling_policy" in str(results[3])
    assert isinstance(results[4], InvalidRequestError) and "sampling_params must be" in str(results[4])


@pytest.mark.parametrize("request_id", [5, ["x"], b"x"])
async def test_generate_request_id_that_is_no_text_is_rejected(llm_async: AsyncLLM, request_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id must be text, got"):
        await collect(llm_async.generate(PROMPTS[0], LONG, request_id))


async def test_generate_ids_of_the_caller_do_not_collide_with_automatic_ones(llm_async: AsyncLLM) -> None:
    named = [llm_async.generate(PROMPTS[0], LONG, str(number)) for number in range(3)]
    streams = await asyncio.gather(*map(collect, [*named, *(llm_async.generate(PROMPTS[0], LONG) for _ in range(3))]))
    assert len({stream[-1].request_id for stream in streams}) == 6


async def test_generate_more_requests_than_the_queue_holds_all_finish(folder: Path) -> None:
    llm = AsyncLLM(str(folder), max_num_seqs=2, **OPTIONS)
    llm.config = replace(llm.config, max_queued_tokens=5)
    async with llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        streams = await asyncio.gather(*(collect(llm.generate([number, 1, 2], params)) for number in range(12)))
        assert [stream[-1].prompt_token_ids[0] for stream in streams] == list(range(12))
        assert all(len(stream[-1].outputs[0].token_ids) == 3 for stream in streams)


async def test_chat_streams_the_answer_to_a_conversation(llm_async: AsyncLLM, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    stream = await collect(llm_async.chat(messages, PARAMS[0]))
    assert stream[-1].prompt == "[user]Hi[bot]"
    assert stream[-1].outputs == llm.chat(messages, PARAMS[0])[0].outputs


async def test_explain_and_reset_reach_the_engine(llm_async: AsyncLLM) -> None:
    await collect(llm_async.generate(PROMPTS[2], PARAMS[0]))
    assert (await llm_async.explain(PROMPTS[2])).num_cached_tokens >= 32
    assert await llm_async.reset_prefix_cache()
    assert (await llm_async.explain(PROMPTS[2])).num_cached_tokens == 0


async def test_request_to_a_closed_object_raises(folder: Path) -> None:
    async with AsyncLLM(str(folder), **OPTIONS) as llm:
        pass
    with pytest.raises(EngineError, match="closed"):
        await collect(llm.generate(PROMPTS[0]))
    for query in (llm.explain(PROMPTS[0]), llm.reset_prefix_cache()):
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(query, 10)


async def test_object_closed_before_its_first_request_loads_no_model(folder: Path) -> None:
    llm = AsyncLLM(str(folder), **OPTIONS)
    await llm.close()
    with pytest.raises(EngineError, match="closed"):
        await collect(llm.generate(PROMPTS[0]))
    assert llm._engine._thread is None
