"""What every driver does: say when it is ready, then carry out one command per line and say how long it took.

Runs under several Pythons, so it uses nothing but the standard library. A command is a JSON object:
`{"do": "generate", "prompts": [[token, ...], ...], "max_tokens": 64, "n": 1}`, or `"do": "beam"` with `"n"` as the
width, or `"do": "quit"`. The answer is `{"s": seconds, "tokens": generated}`, or `{"not": reason}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class NotDone(Exception):
    """This engine does not do what was asked."""


def serve(engine: Any) -> None:
    """Answer commands until told to stop.

    `engine` has generate(prompts, max_tokens, n) and beam(prompt, width, max_tokens); both return how many tokens.
    """
    answers = os.fdopen(int(os.environ["PEER_ANSWERS"]), "w", buffering=1)  # engines print what they like to stdout
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        start = time.perf_counter()
        try:
            if command["do"] == "beam":
                tokens = engine.beam(command["prompts"][0], command["n"], command["max_tokens"])
            else:
                tokens = engine.generate(command["prompts"], command["max_tokens"], command["n"])
            answer = {"s": time.perf_counter() - start, "tokens": tokens}
        except NotDone as error:
            answer = {"not": str(error)}
        answers.write(json.dumps(answer) + "\n")


def folder() -> str:
    """Return the model folder (of llama.cpp, the file)."""
    return sys.argv[1]


def num_threads() -> int:
    """Return how many threads to compute with."""
    return int(os.environ["OMP_NUM_THREADS"])
