"""Record of all client observations, one JSON object per line of `history.jsonl`; input of the checker.

fault      step, name, phase (begin | end), target          a fault of the plan
invoke     op, key, tags, words, n, transport               a turn was sent (again); tags of the path, its own last
ack        op, response, conversation                       the turn was acknowledged
open       op, stream, response, after                      a stream was opened after frame `after` (-1: from the start)
frame      stream, seq, type, index, text                   a frame; text: of a delta, or all of it in `.done`
jump       stream, seq, texts                               a snapshot replaces all frames up to seq
close      stream, how                                      end (by the server) | cut (by the client) | lost
ended      op, response, status, texts, saved               the final state, from the terminal frame or a plain answer
refused    op, status, code                                 a final refusal
leave      op, response                                     cancelled, or left by its only reader: any end is allowed
delete     op, conversation | response, done                requested (done false), acknowledged (true)
stored     conversation, items                              what a new gateway returns after the run
ledger     gateway, problems                                what did not become idle
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class History:
    """Append-only record. Each entry has `t`, seconds since the start of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", buffering=1)
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    def note(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"t": round(self.now_s, 4), "kind": kind, **fields}) + "\n")

    def close(self) -> None:
        self._file.close()


def entries_of(path: Path) -> Iterator[Entry]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)
