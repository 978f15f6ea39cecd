"""The engine runs on a machine with torch and transformers, without the gateway's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatcache.bench.drivers import SHAPES, EngineDriver, RandomWeights, write_config
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.loading.loader import load_model
from chatcache.types.events import Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams

CHILD = """
import runpy, sys
missing, stand_in, script, folder = sys.argv[1].split(), sys.argv[2], sys.argv[3], sys.argv[4]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
if stand_in:
    sys.path.insert(0, stand_in)
    import msgspec.structs
sys.meta_path.insert(0, Refuse())
import json, pathlib
print(json.dumps(runpy.run_path(script)["answers"](pathlib.Path(folder))))
"""
ROOT = Path(__file__).resolve().parents[2]
WEB = "starlette uvicorn uvloop httptools typer rich prometheus_client sse_starlette websockets httpx"
MISSING = f"msgspec redis llguidance {WEB}"


def answers(folder: Path) -> list[list[int]]:
    """Return the tokens of all candidates of a greedy, a sampled and a beam search request."""
    write_config(SHAPES["tiny"], folder)
    weights = RandomWeights(SHAPES["tiny"], "cpu", std=0.2)
    config = EngineConfig(
        model=str(folder), dtype="float32", attention_backend="reference", kv_memory_bytes=2**20, device="cpu"
    )
    runner = load_model(config, weights=weights)
    engine = Engine(runner, runner.model_info, config)
    prompt = EngineDriver(engine).prompt(40)
    kinds: list[Params] = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(n=3, seed=7, top_p=0.9, repetition_penalty=1.1, max_tokens=12, stop_token_ids=[3]),  # type: ignore[arg-type]
        BeamSearchParams(beam_width=3, max_tokens=8, logprobs=2),
    ]
    for number, params in enumerate(kinds):
        engine.add(GenerateRequest(request_id=f"{number}", prompt=prompt[number:], params=params))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    engine.cache.check()
    return [tokens[key] for key in sorted(tokens)]


def run_bare(folder: Path, stand_in: str) -> subprocess.CompletedProcess[str]:
    """Run `answers` in a process without the packages, with msgspec from `stand_in`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    command = [sys.executable, "-c", CHILD, MISSING, stand_in, __file__, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_engine_runs_without_the_packages_of_the_gateway(tmp_path: Path) -> None:
    done = run_bare(tmp_path, str(ROOT / "kernels" / "bench" / "bare"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == answers(tmp_path) and len(found) == 1 + 3 + 3 and len(set(map(tuple, found))) == 7


def test_engine_without_msgspec_stand_in_fails(tmp_path: Path) -> None:
    done = run_bare(tmp_path, "")
    assert done.returncode and "No module named 'msgspec'" in done.stderr
