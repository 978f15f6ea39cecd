"""What clients saw, as it happened: one JSON object to a line of `history.jsonl`. The checker reads nothing else.

fault      step, name, phase (begin | end), target          what the runner did to the processes
invoke     op, key, tags, words, n, transport               a turn was sent (again): tags of the path, its own last
ack        op, response, conversation                       it was acknowledged
open       op, stream, response, after                      frames behind number `after` are asked for (-1: all)
frame      stream, seq, type, index, text                   one came; text: of a delta, or all of it in `.done`
jump       stream, seq, texts                               a snapshot stands for all frames up to seq
close      stream, how                                      end (by the server) | cut (by the client) | lost
ended      op, response, status, texts, saved               how it ended, by terminal frame or plain answer
refused    op, status, code                                 a definite no
leave      op, response                                     cancelled, or left by its only reader: may end anyhow
delete     op, conversation | response, done                asked for (done false), acknowledged (true)
stored     conversation, items                              what a fresh gateway tells at the very end
ledger     gateway, problems                                what did not come back to rest
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class History:
    """Append-only. Each entry has `t`, seconds since the beginning."""

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
