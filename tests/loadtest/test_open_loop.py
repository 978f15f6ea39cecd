"""Open-loop load against the real gateway over a fake engine, and against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from chatcache.config import ServerConfig
from loadtest.__main__ import main
from loadtest.lengths import GammaLengths
from loadtest.open_loop.generator import LoadGenerator, RequestResult
from loadtest.open_loop.server import WORDS, Server, ServerError, ServerOptions, complete, connect
from loadtest.open_loop.traces import TraceRequest
from loadtest.open_loop.workload import (
    LengthLimits,
    Plan,
    PlannedConversation,
    PlannedTurn,
    PromptTokens,
    Turns,
    plan_poisson,
    plan_trace,
)
from tests.gateway.serving import MAX_MODEL_LEN, PAGE_SIZE
from tests.gateway.serving import Server as Gateway

TOKEN_IDS = range(200, 440)  # ordinary tokens of the test tokenizer
LENGTHS = GammaLengths(40, 0.8, 6, 0.8, max_total=200)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "chats.db"))
    with Gateway(config, num_pages=8192) as running:
        yield running.wait_ready()


def connected(gateway: Gateway, **options: Any) -> Server:
    return asyncio.run(connect(ServerOptions("ours", gateway.url, token_ids=TOKEN_IDS, **options)))


def run(server: Server, plan: Plan, **options: Any) -> list[RequestResult]:
    results, _ = asyncio.run(LoadGenerator(server, plan, timeout_s=60, **options).run())
    assert len(results) == plan.num_requests or any(result.error for result in results)
    return results


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- the real gateway ---------------------------------------------------------------------------------------------


def test_connect_finds_what_the_gateway_takes(gateway: Gateway) -> None:
    server = connected(gateway)
    assert server.takes_token_ids and server.takes_ignore_eos and server.returns_token_ids
    assert server.model == gateway.request("GET", "/v1/models")[2]["data"][0]["id"]


def test_run_sends_the_planned_lengths_and_counts_what_the_engine_counts(gateway: Gateway) -> None:
    server, plan = connected(gateway), plan_poisson(200, 0.2, LENGTHS, LengthLimits(), Turns(), "lengths")
    before = gateway.call(gateway.engine.health())
    results = run(server, plan)
    after = gateway.call(gateway.engine.health())
    assert len(results) == plan.num_requests > 20 and not any(result.error for result in results)
    planned = [conversation.turns[0] for conversation in plan.conversations]
    for result, turn in zip(results, planned, strict=True):
        assert result.num_reported_prompt_tokens == result.num_prompt_tokens == turn.num_prompt_tokens
        assert result.num_received_tokens == result.num_output_tokens == turn.num_output_tokens
        assert result.ttft_s is not None and 0 < result.ttft_s <= result.latency_s and result.lag_s >= 0
        assert result.ttft_s + sum(result.gaps_s) <= result.latency_s + 1e-9, "the last event may have no text"
    assert sum(r.num_received_tokens for r in results) == after.num_output_tokens - before.num_output_tokens
    assert sum(r.num_prompt_tokens for r in results) == after.num_prompt_tokens - before.num_prompt_tokens
    assert sum(r.num_cached or 0 for r in results) == after.num_cached_tokens - before.num_cached_tokens


def test_block_trace_hits_the_cache_as_an_infinite_cache_would(gateway: Gateway) -> None:
    """The pool is larger than the trace; prompts that arrive together may miss tokens of each other's last page."""
    ids = [(1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8), (1, 2, 3, 9), (6, 7, 8, 10, 11), (1, 2, 3)]
    trace = [[TraceRequest(n / 50, 512 * len(blocks) - 100 * (n % 2), 48, blocks)] for n, blocks in enumerate(ids)]
    server, plan = connected(gateway), plan_trace(trace, 1.0, 10.0, LengthLimits(1 / 16), "blocks")
    assert plan.block_tokens == 32
    results, tokens = run(server, plan), PromptTokens(plan, server.num_units)
    prompts = [tokens.draw(each.turns[0], number, 0) for number, each in enumerate(plan.conversations)]
    for number, result in enumerate(results):
        ideal = max((common_prefix(prompts[number], earlier) for earlier in prompts[:number]), default=0)
        ideal = min(ideal, result.num_prompt_tokens - 1)
        assert ideal - 1 <= result.num_ideal_cached <= ideal, "but for an equal token by chance"
        assert result.num_cached is not None and ideal - PAGE_SIZE < result.num_cached <= ideal
    assert sum(result.num_ideal_cached for result in results) > 200


@pytest.mark.parametrize("with_ids", [True, False], ids=["reply-ids", "unknown-reply"])
def test_later_turns_continue_the_conversation_after_the_think_time(gateway: Gateway, with_ids: bool) -> None:
    server = replace(connected(gateway), returns_token_ids=with_ids)
    plan = plan_poisson(120, 0.2, LENGTHS, LengthLimits(), Turns(3, 0.01), f"turns {with_ids}")
    results = {(result.conversation, result.turn): result for result in run(server, plan)}
    assert len(results) == plan.num_requests >= 6
    for (number, turn), result in results.items():
        planned = plan.conversations[number].turns[turn]
        assert not result.error and result.num_reported_prompt_tokens == result.num_prompt_tokens
        if not turn:
            assert result.planned_s == plan.conversations[number].at_s and result.num_ideal_cached == 0
            continue
        before = results[number, turn - 1]
        history = before.num_prompt_tokens + before.num_received_tokens
        assert result.num_prompt_tokens == history + planned.num_prompt_tokens
        assert result.planned_s == pytest.approx(before.planned_s + before.latency_s + planned.think_s)
        assert result.num_ideal_cached == history - 1
        found = history if with_ids else before.num_prompt_tokens
        assert result.num_cached is not None and found - 1 - PAGE_SIZE < result.num_cached <= found


def test_too_long_prompts_fail_by_name_and_end_their_conversation(gateway: Gateway) -> None:
    turns = PlannedTurn(MAX_MODEL_LEN + 1, 4), PlannedTurn(5, 4)
    plan = Plan((PlannedConversation(0.0, turns), PlannedConversation(0.0, turns[1:])), 1.0, "long")
    failed, completed = run(connected(gateway), plan)
    assert (failed.error, completed.error) == ("HTTP 400", "") and "context" in failed.detail


@pytest.mark.slow
def test_main_writes_a_curve_and_plot_merges_two(gateway: Gateway, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("30,5\n10,7\n")
    arguments = ["--server", f"one={gateway.url}", "--server", f"two={gateway.url}", "--rate", "30,60", "--seed", "1"]
    arguments += ["--duration", "0.3", "--lengths", str(lengths), "--token-ids", "200-439", "--out", str(tmp_path)]
    arguments += ["--ttft-limit", "30", "--itl-limit", "30", "--lag-limit", "30"]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("open-loop-*.json")
    document = json.loads(path.read_text())
    assert [(run["server"], run["rate"]) for run in document["runs"]] == [
        ("one", 30.0), ("two", 30.0), ("two", 60.0), ("one", 60.0)
    ]  # fmt: skip
    assert all(run["goodput"] == pytest.approx(run["offered_rate"], abs=1e-3) for run in document["runs"])
    assert all(run["normalized_latency_s"] > 0 and not run["is_late"] for run in document["runs"])
    with path.with_suffix(".csv").open() as file:
        assert len(list(csv.DictReader(file))) == sum(run["requests"] for run in document["runs"])
    assert path.with_suffix(".png").stat().st_size > 5_000
    assert main(["plot", str(path), str(path), "--out", str(tmp_path / "both.svg")]) == 0
    assert "one" in (tmp_path / "both.svg").read_text() and (tmp_path / "both.png").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--rate", "1,x"],
        ["--rate", "1", "--server", "http://x"],
        ["--rate", "1", "--think-time", "2"],
        ["--rate", "1", "--time-scale", "2"],
        ["--trace", "t.csv", "--lengths", "alpaca"],
    ],
)
def test_arguments_without_effect_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)


def test_main_without_server_or_trace_returns_two(tmp_path: Path) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--rate", "1", "--out", str(tmp_path)]) == 2
    assert main(["--trace", str(tmp_path / "none.csv"), "--out", str(tmp_path)]) == 2
    assert main(["plot", str(tmp_path / "none.json")]) == 2


# -- scripted servers ---------------------------------------------------------------------------------------------

Handler = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[Server]:
    """Serve each request by `handler(path, JSON body, writer)`."""
    tasks: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0]) if "content-length:" in head else 0
        body = json.loads(await reader.readexactly(length)) if length else {}
        try:
            await handler(head.split()[1], body, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield Server("scripted", f"http://127.0.0.1:{port}", "m", lambda units: list(units), 100)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def stream_of(num_tokens: int, text: str = "a") -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
    events = [{"choices": [{"text": text}]}] * num_tokens + [{"choices": [], "usage": usage}]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def plan_of(num_requests: int) -> Plan:
    turns = (PlannedTurn(3, 2),)
    return Plan(tuple(PlannedConversation(n / 100, turns) for n in range(num_requests)), num_requests / 100, "scripted")


async def test_arrivals_do_not_wait_for_replies() -> None:
    """The server replies to the first request only after the last one has arrived."""
    num_arrived, all_arrived = 0, asyncio.Event()

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived == 30:
            all_arrived.set()
        await all_arrived.wait()
        writer.write(answer(stream_of(2)))

    async with asyncio.timeout(60), scripted(handler) as server:
        generator = LoadGenerator(server, plan_of(30), timeout_s=60)
        results, _ = await generator.run()
    assert not any(result.error for result in results) and generator.max_in_flight == 30
    assert [result.num_received_tokens for result in results] == [2] * 30


async def test_requests_beyond_the_connection_limit_fail_at_once() -> None:
    """The server replies to the five open requests only after seven others have failed."""
    release, finished = asyncio.Event(), []

    def on_result(result: RequestResult) -> None:
        finished.append(result)
        if len(finished) == 7:
            release.set()

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer(stream_of(2)))

    async with scripted(handler) as server:
        generator = LoadGenerator(server, plan_of(12), timeout_s=60, max_in_flight=5, on_result=on_result)
        results, _ = await generator.run()
    assert [result.error for result in results] == [""] * 5 + ["connection limit"] * 7
    assert generator.max_in_flight == 5


async def test_reply_without_text_counts_by_its_usage() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer(stream_of(3, text="")))

    async with scripted(handler) as server:
        (result,), _ = await LoadGenerator(server, plan_of(1), timeout_s=60).run()
    assert not result.error and result.num_received_tokens == 3 and result.ttft_s == result.latency_s > 0


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(stream_of(2)), ""),
        (answer(stream_of(2).replace(b"\n", b"\r\n")), ""),
        (b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(2), ""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n0\r\n\r\n", "stream ended early"),
        (answer(b"data: [DONE]\n\n"), "no tokens"),
        (answer(stream_of(2)[:60]), "stream ended early"),
        (answer(stream_of(2))[:-30], "stream ended early"),
        (answer(b"data: nonsense\n\n"), "invalid event"),
        (answer(b'data: {"error": {"code": "engine_failed", "message": "m"}}\n\n'), "error event engine_failed"),
        (answer(b'{"error": "queue full"}', 429), "HTTP 429"),
        (b"nonsense\r\n\r\n", "not HTTP"),
        (b"", "connection closed"),
    ],
)
async def test_replies_are_classified_by_name(reply: bytes, error: str) -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(reply)

    async with scripted(handler) as server:
        found = await complete(server, server.request([1], 2), 60)
    assert found.error.startswith(error) and bool(found.error) == bool(error)
    assert error or (len(found.token_times_s), found.num_output_tokens, found.num_prompt_tokens) == (2, 2, 1)


async def test_request_without_reply_times_out() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with scripted(handler) as server:
        found = await complete(server, server.request([1], 2), 0.05)
        assert found.error == "timeout"
    assert (await complete(server, server.request([1], 2), 60)).error == "no connection"


def word_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer with a token for each word, which begins each text with a special token."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<s>", "<unk>", *WORDS[:40]])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path))
    return backend


@pytest.mark.parametrize("form", ["vllm", "llama.cpp", "file"])
async def test_server_without_token_ids_gets_text_of_exact_length(form: str, tmp_path: Path) -> None:
    """The server takes text only, no ignore_eos and no return_token_ids; its prompts begin with a special token."""
    backend = word_tokenizer(tmp_path / "tokenizer.json")

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            writer.write(answer(b'{"data": [{"id": "words"}]}'))
        elif path == "/tokenize" and form != "file":
            text = body["prompt" if form == "vllm" else "content"]
            writer.write(answer(json.dumps({"tokens": backend.encode(text).ids}).encode()))
        elif path == "/v1/completions" and isinstance(body["prompt"], str) and "ignore_eos" not in body:
            usage = {"prompt_tokens": len(backend.encode(body["prompt"]).ids), "completion_tokens": 2}
            event = json.dumps({"choices": [{"text": " time"}], "usage": usage}).encode()
            writer.write(answer(b"data: " + event + b"\n\ndata: [DONE]\n\n" if body.get("stream") else event))
        else:
            writer.write(answer(b'{"error": {"message": "refused"}}', 400 if path != "/tokenize" else 404))

    async with scripted(handler) as running:
        file = tmp_path / "tokenizer.json" if form == "file" else None
        server = await connect(ServerOptions("text", running.url, tokenizer=file))
        assert not (server.takes_token_ids or server.takes_ignore_eos or server.returns_token_ids)
        assert (server.num_units, server.num_special_tokens, server.model) == (41, 1, "words")  # one of them unknown
        plan = plan_poisson(100, 0.2, LENGTHS, LengthLimits(), Turns(), "text")
        results, _ = await LoadGenerator(server, plan, timeout_s=60).run()
        assert [r.num_reported_prompt_tokens for r in results] == [r.num_prompt_tokens for r in results]
        if form == "file":
            with pytest.raises(ServerError, match="give a --tokenizer"):
                await connect(ServerOptions("text", running.url))
