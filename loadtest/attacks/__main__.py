"""`python -m loadtest.attacks`: run each attack against a server of its own and print what other clients notice."""

from __future__ import annotations

import argparse
import asyncio
import sys

from chatcache.bench.report import Figure, figure_table
from loadtest.attacks import (
    chat_logprobs,
    json_bodies,
    large_conversation,
    many_reads,
    output_logprobs,
    websocket_frames,
)
from loadtest.attacks.harness import Attack, measure_attack, running_server

_ATTACKS = (
    large_conversation.ATTACK,
    many_reads.ATTACK,
    websocket_frames.ATTACK,
    output_logprobs.ATTACK,
    chat_logprobs.ATTACK,
    json_bodies.ATTACK,
)
ATTACKS: dict[str, Attack] = {attack.name: attack for attack in _ATTACKS}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    attacks = "\n".join(f"  {attack.name:20} {attack.summary}" for attack in ATTACKS.values())
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.attacks",
        description="Measure other clients' p99 and the gateway's memory under attacks.",
        epilog=f"attacks:\n{attacks}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(ATTACKS),
        default=list(ATTACKS),
        metavar="NAME",
        help="attacks to measure; default: all",
    )
    parser.add_argument("--seconds", type=float, default=16.0, help="length of each measurement")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before and after an attack is measured")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every figure meets its goal, else 1."""
    args = _arguments(argv)
    figures: list[Figure] = []
    for name in args.only:
        attack = ATTACKS[name]
        with running_server() as target:
            found = asyncio.run(measure_attack(attack, target, args.seconds, args.settle))
        for figure in found:
            print(figure.line(), flush=True)
        figures += found
    if len(args.only) > 1:
        print(figure_table(figures))
    return 0 if all(figure.met is not False for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
