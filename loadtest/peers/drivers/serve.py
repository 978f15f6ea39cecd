"""The command loop of all drivers: one JSON command per line, one JSON result per line.

It runs in several Pythons, so it uses only the standard library. A command is a JSON object:
`{"do": "generate", "prompts": [[token, ...], ...], "max_tokens": 64, "n": 1}`, or `"do": "beam"` with `"n"` as the
width, or `"do": "quit"`. The result is `{"s": seconds, "tokens": generated}`, or `{"unsupported": reason}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class UnsupportedError(Exception):
    """The engine does not support the command."""


def serve(engine: Any) -> None:
    """Execute commands until the quit command or the end of the input.

    `engine` has generate(prompts, max_tokens, n) and beam(prompt, width, max_tokens); both return the number of tokens.
    """
    results = os.fdopen(int(os.environ["PEER_RESULTS"]), "w", buffering=1)  # because engines print to stdout
    results.write(json.dumps({"ready": True}) + "\n")
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
            result = {"s": time.perf_counter() - start, "tokens": tokens}
        except UnsupportedError as error:
            result = {"unsupported": str(error)}
        results.write(json.dumps(result) + "\n")


def folder() -> str:
    """Return the model folder, or for llama.cpp the model file."""
    return sys.argv[1]


def num_threads() -> int:
    """Return the number of threads to compute with."""
    return int(os.environ["OMP_NUM_THREADS"])
