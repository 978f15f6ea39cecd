"""`python -m loadtest.peers`: engine processes, commands and the table, with a test engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.peers import cases, engines
from loadtest.peers.__main__ import compare_medians, main, prepare_model, vocab_size
from loadtest.peers.cases import CASES, Prompts, UnsupportedError
from loadtest.peers.engines import EngineProcess, Peer, PeerError, find_peers

DRIVER = """
import sys
from collections.abc import Iterator
from contextlib import contextmanager
sys.path.insert(0, {drivers!r})
from serve import UnsupportedError, serve

class Engine:
    def generate(self, prompts, max_tokens, n):
        if max_tokens == 13:
            raise RuntimeError("thirteen")
        return len(prompts) * n * max_tokens

    def beam(self, prompt, width, max_tokens):
        raise UnsupportedError("no beams here")

print("engines print to stdout")
serve(Engine())
"""


class Recorder:
    """An engine that records every command, and is half as fast next to busy processes."""

    cpus = None

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []
        self.busy: list[int] = []

    def execute(self, **command: Any) -> dict[str, Any]:
        self.commands.append(command)
        return {"s": 0.5 * command["max_tokens"] * (1 + min(1, len(self.busy)))}


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(drivers=str(engines.DRIVERS)))
    return Peer("made", Path(sys.executable), str(driver), tmp_path)


def test_engine_process_executes_commands_until_stopped(peer: Peer, tmp_path: Path) -> None:
    process = EngineProcess(peer, 1, tmp_path / "log")
    assert process.start_s > 0
    answer = process.execute(do="generate", prompts=[[1], [2]], max_tokens=3, n=2)
    assert answer["tokens"] == 12 and answer["s"] >= 0
    assert process.execute(do="beam", prompts=[[1]], max_tokens=3, n=2) == {"unsupported": "no beams here"}
    with pytest.raises(PeerError, match="made ended with status 1: RuntimeError: thirteen"):
        process.execute(do="generate", prompts=[[1]], max_tokens=13, n=1)
    process.stop()


def test_cases_send_the_commands_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, counts = {}, []

    @contextmanager
    def busy_processes(count: int, cpus: None) -> Iterator[None]:
        counts.append(count)
        recorder.busy.append(count)
        yield
        recorder.busy.clear()

    monkeypatch.setattr(cases, "busy_processes", busy_processes)
    for case in CASES:
        recorder = Recorder()
        value = case.measure(recorder, Prompts("1", 100))
        commands[case.name] = [
            (len(c["prompts"]), len(c["prompts"][0]), c["max_tokens"], c["n"]) for c in recorder.commands
        ]
        assert value == 0.5 if case.group == "contention" else value > 0
    assert counts == [1, 2, 1, 2]
    assert commands["decode, batch 32"] == [(32, 64, 1, 1), (32, 64, 65, 1)]
    assert commands["n = 8 after 1k"] == [(1, 1024, 1, 8), (1, 1024, 65, 8)]
    assert commands["decode, batch 8, 2 busy"] == 2 * [(8, 64, 1, 1), (8, 64, 65, 1)]
    assert commands["beam 8, 512 + 64"] == [(1, 512, 64, 8)]
    assert commands["first token, 2k cached + 16"] == [(1, 2048, 1, 1), (1, 2064, 1, 1)]
    decode = next(case for case in CASES if case.name == "decode, batch 8")
    assert decode.measure(Recorder(), Prompts("1", 100)) == 8 * 64 / 32  # 64 of 65 tokens at half a second


def test_prompts_repeat_after_restore() -> None:
    prompts = Prompts("seed", 1000)
    state = prompts.state()
    first = prompts(2, 5)
    assert prompts(2, 5) != first
    prompts.restore(state)
    assert prompts(2, 5) == first


def test_find_peers_reports_missing_engines(tmp_path: Path) -> None:
    peers, missing = find_peers(tmp_path, tmp_path, None, Path(sys.executable))
    assert [peer.name for peer in peers] == ["chatcache", "transformers"]
    assert missing[0] == "vllm: left out, no --vllm-python given"
    assert "has no module llama_cpp" in missing[1]


def test_compare_medians_reports_ratios_to_the_first_engine() -> None:
    values = {"chatcache": [10.0, 30.0, 20.0], "vllm": [5.0], "llama.cpp": []}
    assert compare_medians(values, list(values), more_is_better=True) == ["20", "5 (4.00x)", "-"]
    assert compare_medians(values, list(values), more_is_better=False) == ["20", "5 (0.25x)", "-"]


def test_prepare_model_adds_a_tokenizer(tmp_path: Path) -> None:
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 7}))
    folder = prepare_model(model, scratch)
    assert vocab_size(folder) == 7
    assert not any(path.is_symlink() for path in folder.iterdir()), "chatcache refuses links that leave the folder"
    assert len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) == 7
    assert not (model / "tokenizer.json").exists()


def test_main_drops_a_failed_engine_and_continues(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("broken", Path(sys.executable), str(tmp_path / "none.py"), tmp_path)
    monkeypatch.setattr("loadtest.peers.__main__.find_peers", lambda *_: ([peer, broken], ["other: left out"]))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    out = tmp_path / "out" / "peers.json"
    code = main(
        ["--model", str(tmp_path), "--only", "beam,prefix", "--repeat", "2", "--threads", "1", "--out", str(out)]
    )
    report = json.loads(out.read_text())
    assert code == 1
    assert "broken ended with status" in report["errors"][0]
    assert report["figures"]["beam 4, 512 + 64"]["made"] == []
    assert len(report["figures"]["first token, 2k anew"]["made"]) == 2
    assert "other: left out" in capsys.readouterr().out


def test_unsupported_command_raises() -> None:
    class Refuses:
        cpus = None

        def execute(self, **command: Any) -> dict[str, Any]:
            return {"unsupported": "no"}

    with pytest.raises(UnsupportedError, match="no"):
        CASES[0].measure(Refuses(), Prompts("1", 10))
