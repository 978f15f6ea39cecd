"""Tensor parallelism: ranks over gloo against one process, refusals, and ranks that end or stop answering."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chatcache import LLM, SamplingParams
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine_process.process import EngineProcess, RestartPolicy
from chatcache.errors import DeviceLostError, ModelFolderError
from chatcache.factory import build_engine
from chatcache.llm.outputs import RequestOutput
from chatcache.model import parallel
from chatcache.model.loading.config_reader import read_architecture
from chatcache.model.loading.files import read_config, weight_files
from chatcache.model.loading.loader import load_model
from chatcache.model.loading.weights import Weights
from chatcache.model.parallel import (
    STEP_TIMEOUT_S,
    RankGroup,
    RankWeights,
    Shard,
    decode_plan,
    encode_plan,
    read_frame,
)
from chatcache.model.runner import Runner
from chatcache.types.events import Tokens
from chatcache.types.plan import LogitEdit, Pools, Rows, Scores, StepPlan, edit_table
from chatcache.types.request import BeamSearchParams, GenerateRequest
from tests.engine_process.engines import until
from tests.model.drive import make_draws
from tests.model.families import Sample

Samples = Callable[[str], Sample]
FAMILIES = ("llama", "qwen3", "phi3")
BUILD = "tests.model.test_parallel:build_without_tokenizer"
ONE_LIFE = RestartPolicy(max_deaths=1)
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@contextmanager
def serving(sample: Sample, num_ranks: int, **options: Any) -> Iterator[LLM]:
    settings = {"dtype": "float32", "device": "cpu", "kv_memory": 4 << 20, "page_size": 8, "max_num_seqs": 16}
    with LLM(str(sample.folder), tensor_parallel_size=num_ranks, **{**settings, **options}) as llm:
        yield llm


def build_without_tokenizer(config: EngineConfig, progress: Any) -> Engine:
    return build_engine(config, progress, need_tokenizer=False)


def rank_of(pid: int) -> int:
    """Return the process id of the rank that an engine process has started."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    (rank,) = [each for each in children if b"run_rank" in command_of(each)]
    return rank


async def was_replaced(engine: EngineProcess) -> bool:
    return engine.num_restarts == 1 and (await engine.health()).ready


async def has_ended(pid: int) -> bool:
    return not command_of(pid)


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended, also if its parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def everything(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Run every kind of decoding; return the tokens, and how many prompt tokens were cached."""
    found: dict[str, Any] = {"greedy": tokens_of(llm.generate(prompts, GREEDY))}
    sampled = SamplingParams(temperature=0.9, top_p=0.95, n=3, seed=7, max_tokens=16, repetition_penalty=1.1)
    found["n-best"] = tokens_of(llm.generate(prompts, sampled))
    found["beams"] = tokens_of(llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=12)))
    turns = [prompt + found["greedy"][place][0] + [5, 6, 7] for place, prompt in enumerate(prompts)]
    second = llm.generate(turns, GREEDY)
    found["second turn"] = tokens_of(second)
    found["cached"] = [output.num_cached_tokens for output in second]
    scored = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2))
    found["scored"] = [[sorted(row) for row in output.prompt_logprobs or () if row] for output in scored]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "deterministic"),
    [*((name, 2, is_ordered) for name in FAMILIES for is_ordered in (False, True)), ("llama", 4, False)],
)
def test_ranks_return_the_tokens_of_one_process(
    name: str, num_ranks: int, deterministic: bool, sample_of: Samples
) -> None:
    """With 4 ranks, each of the two key/value heads is on two ranks."""
    sample = sample_of(name)
    prompts = [list(prompt) for prompt in sample.prompts]
    options = {"deterministic": deterministic, "attention_backend": "cpu" if deterministic else "reference"}
    with serving(sample, 1, **options) as llm:
        expected = everything(llm, prompts)
    with serving(sample, num_ranks, **options) as llm:
        assert everything(llm, prompts) == expected
    answers = [list(answer[:20]) for answer in sample.answers]
    assert [branches[0] for branches in expected["greedy"]] == answers
    assert min(expected["cached"]) > 0


@pytest.mark.slow
def test_sums_without_the_other_ranks_are_detected(sample_of: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: rank 0 continues with its own part."""
    sample = sample_of("llama")
    prompts = [list(prompt) for prompt in sample.prompts]
    with serving(sample, 1) as llm:
        expected = tokens_of(llm.generate(prompts, GREEDY))
    original = RankGroup.sum

    def keep_own_part(group: RankGroup, x: torch.Tensor) -> torch.Tensor:
        own = x.clone()
        original(group, x)
        return own

    monkeypatch.setattr(RankGroup, "sum", keep_own_part)
    with serving(sample, 2) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) != expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_ranks_preempt_as_one_process(mode: str, sample_of: Samples) -> None:
    sample = sample_of("llama")
    prompts = [list(prompt) for prompt in sample.prompts] * 2
    page_bytes = 8 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dimensions, bytes
    options = {"preemption_mode": mode, "kv_memory": 30 * page_bytes, "swap_space": 60 * page_bytes}
    params = SamplingParams(temperature=0.8, n=2, seed=3, max_tokens=40)
    results, stats = [], []
    for num_ranks in (1, 2):
        with serving(sample, num_ranks, attention_backend="reference", **options) as llm:
            results.append(tokens_of(llm.generate(prompts, params)))
            stats.append(llm.health())
    assert results[0] == results[1]
    assert stats[1].num_preemptions > 0
    assert (stats[1].num_pages_swapped_out > 0) == (mode == "swap")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_ends_or_stops_fails_the_step_by_name(number: int, sample_of: Samples) -> None:
    config = EngineConfig(model=str(sample_of("llama").folder), tensor_parallel_size=2, dtype="float32", device="cpu")
    runner = load_model(config)
    assert runner._ranks is not None
    (pid,) = runner._ranks.pids
    rows = Rows(*(np.array(each, np.int32) for each in ([0], [0], [3], [5, 6, 7])))
    none = np.zeros((0, 3), np.int32)
    plan = StepPlan(1, none, np.array([[0, 0, 1]], np.int32), none[:, :2], rows, make_draws([{}]))
    try:
        assert len(runner.execute(plan).tokens) == 1
        runner.check_device()
        os.kill(pid, number)
        expected = (
            f"rank 1 .process {pid}. ended with status -9"
            if number == signal.SIGKILL
            else f"[Tt]imed out waiting {STEP_TIMEOUT_S * 1000:.0f}ms"
        )
        with pytest.raises(DeviceLostError, match=expected):
            runner.execute(replace(plan, step=2))
        await until(lambda: is_noticed(runner, f"rank 1 (process {pid}) ended with status -9"))
    finally:
        runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def is_noticed(runner: Runner, message: str) -> bool:
    """Return whether the check of an idle runner says this; a killed process takes a moment to end."""
    try:
        runner.check_device()
    except DeviceLostError as error:
        return message in str(error)
    return False


@pytest.mark.slow
async def test_replies_continue_identically_after_a_rank_is_killed(sample_of: Samples) -> None:
    folder = str(sample_of("qwen3").folder)
    config = EngineConfig(
        model=folder, tensor_parallel_size=2, dtype="float32", device="cpu", deterministic=True, max_num_seqs=8
    )
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=120)
    received: list[list[int]] = []
    async with EngineProcess(config, BUILD, log_level="error") as engine:
        await engine.wait_loaded()
        for kill in (False, True):
            request = GenerateRequest(request_id=f"kill {kill}", prompt=tuple(range(5, 40)), params=params)
            await engine.submit(request)
            tokens: list[int] = []
            async for event in engine.events(request.request_id):
                if isinstance(event, Tokens):
                    tokens += event.token_ids
                    if kill and engine.num_restarts == 0 and len(tokens) == 20:
                        os.kill(rank_of(engine.pid or 0), signal.SIGKILL)
            received.append(tokens)
        assert engine.num_restarts == 1
    assert received[0] == received[1]
    assert len(received[0]) == 120


@pytest.mark.slow
async def test_an_idle_engine_process_is_replaced_after_a_rank_is_killed(sample_of: Samples) -> None:
    config = EngineConfig(
        model=str(sample_of("llama").folder), tensor_parallel_size=2, dtype="float32", device="cpu", max_num_seqs=8
    )
    async with EngineProcess(config, BUILD, log_level="critical") as engine:
        await engine.wait_loaded()
        first = engine.pid
        killed = rank_of(first or 0)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: was_replaced(engine))
        assert (await engine.health()).num_steps == 0
        assert engine.pid != first
        assert rank_of(engine.pid or 0) != killed


@pytest.mark.slow
async def test_a_rank_ends_after_its_engine_process_is_killed(sample_of: Samples) -> None:
    config = EngineConfig(model=str(sample_of("llama").folder), tensor_parallel_size=2, dtype="float32", device="cpu")
    async with EngineProcess(config, BUILD, log_level="critical", policy=ONE_LIFE) as engine:
        await engine.wait_loaded()
        rank = rank_of(engine.pid or 0)
        os.kill(engine.pid or 0, signal.SIGKILL)
        await until(lambda: has_ended(rank))


def test_a_rank_that_ends_while_it_starts_fails_the_load_by_name(
    sample_of: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "RANK_PROGRAM", "raise SystemExit(7)")
    config = EngineConfig(model=str(sample_of("llama").folder), tensor_parallel_size=2, dtype="float32", device="cpu")
    with pytest.raises(DeviceLostError, match=r"rank 1 .* ended with status 7"):
        load_model(config)


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_ends_with_rank_0(tmp_path: Path) -> None:
    program = """
import socket, sys
from chatcache.model.parallel import RankGroup, end_with_rank_0, send_ready
sock = socket.socket(fileno=int(sys.argv[1]))
end_with_rank_0(sock)
send_ready(sock)
RankGroup(1, 2, sys.argv[2], is_ordered=False)
"""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        rank = subprocess.Popen([sys.executable, "-c", program, str(fd), str(tmp_path / "store")], pass_fds=(fd,))
    with ours:
        assert read_frame(ours) == b""
    assert rank.wait(60) == 0


@pytest.mark.parametrize("name", [*FAMILIES, "qwen2"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_shares_of_all_ranks_make_up_the_whole_tensor(name: str, size: int, sample_of: Samples) -> None:
    folder = sample_of(name).folder
    arch = read_architecture(read_config(folder), folder / "config.json")
    whole = Weights(weight_files(folder))
    shards = [Shard(arch, rank, size) for rank in range(size)]
    ranks = [RankWeights(whole, shard) for shard in shards]
    base, local, dim = "model.layers.1", shards[0].local, arch.head_dim
    width, hidden = local.num_heads * dim, arch.hidden_size
    out, down = f"{base}.self_attn.o_proj.weight", f"{base}.mlp.down_proj.weight"
    outs = torch.cat([each.get(out, (hidden, width)) for each in ranks], 1)
    assert outs.equal(whole.get(out, (hidden, arch.num_heads * dim)))
    downs = torch.cat([each.get(down, (hidden, local.intermediate_size)) for each in ranks], 1)
    assert downs.equal(whole.get(down, (hidden, arch.intermediate_size)))
    heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
    if arch.fused:
        qkv = f"{base}.self_attn.qkv_proj.weight"
        q, k, v = torch.split(whole.get(qkv, (sum(heads) * dim, hidden)), [count * dim for count in heads])
        rows = (local.num_heads + 2 * local.num_kv_heads) * dim
        local_widths = [local.num_heads * dim, local.num_kv_heads * dim, local.num_kv_heads * dim]
        parts = [torch.split(each.get(qkv, (rows, hidden)), local_widths) for each in ranks]
    else:
        names = [f"{base}.self_attn.{each}_proj.weight" for each in "qkv"]
        q, k, v = (whole.get(each, (count * dim, hidden)) for each, count in zip(names, heads, strict=True))
        local_heads = (local.num_heads, local.num_kv_heads, local.num_kv_heads)
        pairs = list(zip(names, local_heads, strict=True))
        parts = [tuple(each.get(one, (count * dim, hidden)) for one, count in pairs) for each in ranks]
    assert torch.cat([part[0] for part in parts]).equal(q)
    copies = size // min(size, arch.num_kv_heads)
    for place, expected in ((1, k), (2, v)):
        assert torch.cat([part[place] for part in parts[::copies]]).equal(expected)
        assert all(part[place].equal(parts[rank // copies * copies][place]) for rank, part in enumerate(parts))


@pytest.mark.parametrize(("projection", "dimension"), [("up_proj", 0), ("down_proj", 1)])
def test_a_rank_reads_only_its_share_of_a_divided_tensor(
    projection: str, dimension: int, sample_of: Samples, tmp_path: Path
) -> None:
    """A NaN in the share of rank 1 is found by rank 1 only."""
    folder = sample_of("llama").folder
    arch = read_architecture(read_config(folder), folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.{projection}.weight"
    whole = tensors[name]
    whole[-1, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = (RankWeights(Weights((tmp_path / "model.safetensors",)), Shard(arch, rank, 2)) for rank in (0, 1))
    share, other = whole.chunk(2, dimension)
    assert first.get(name, tuple(share.shape)).equal(share)
    with pytest.raises(ModelFolderError, match="NaN"):
        second.get(name, tuple(other.shape))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gemma2", {}, "native decoder only .* 'gemma2' runs through transformers"),
        ("llama", {"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide num_attention_heads 4"),
        ("llama", {"tensor_parallel_size": 65}, "tensor_parallel_size must be from 1 to 64, got 65"),
        ("llama", {"tensor_parallel_size": 0}, "tensor_parallel_size must be from 1 to 64, got 0"),
        ("llama", {"quantization": "int8"}, "tensor_parallel_size 2 does not work with quantization int8"),
    ],
)
def test_a_model_or_size_that_cannot_be_divided_is_refused(
    name: str, options: dict[str, Any], message: str, sample_of: Samples
) -> None:
    settings = {"tensor_parallel_size": 2, "device": "cpu", **options}
    with pytest.raises(ModelFolderError, match=message):
        load_model(EngineConfig(model=str(sample_of(name).folder), **settings))


@pytest.mark.parametrize("num_tokens", [1, 7, 100])
def test_an_ordered_sum_adds_up_in_the_order_of_the_ranks(num_tokens: int, tmp_path: Path) -> None:
    """In float32, 1e8 + 1 - 1e8 is 0 in this order and 1 in another."""
    parts = [torch.full((num_tokens, 3), value) for value in (1e8, 1.0, -1e8, 0.25)]

    def run(rank: int) -> torch.Tensor:
        group = RankGroup(rank, len(parts), str(tmp_path / "store"), is_ordered=True)
        total = group.sum(parts[rank])
        group.start_serving()
        assert not list(tmp_path.iterdir())  # left behind if the process is killed
        return total

    with ThreadPoolExecutor(len(parts)) as pool:
        totals = list(pool.map(run, range(len(parts))))
    assert all(total.equal(torch.full((num_tokens, 3), 0.25)) for total in totals)


def test_a_plan_arrives_as_it_was_sent_without_edits() -> None:
    rows = Rows(*(np.array(each, np.int32) for each in ([3, 1], [0, 7], [2, 1], [5, 6, 9])))
    pairs, triples = np.array([[1, 2]], np.int32), np.array([[1, 2, 3]], np.int32)
    edit = LogitEdit(0, edit_table([1], 1.0, 1.0))
    one = np.ones(1, np.int32)
    plan = StepPlan(
        9, triples, triples, pairs, rows, make_draws([{"row": 1, "seed": 2**63}], [edit]), swaps_out=pairs,
        scores=Scores(one, one, one), pools=Pools(one, one),
    )  # fmt: skip
    got = decode_plan(encode_plan(plan))
    assert repr(got) == repr(replace(plan, draws=replace(plan.draws, edits=())))
    assert got.rows.tokens.flags.writeable
