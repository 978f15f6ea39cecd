"""What the processes log, to stderr: lines for people, or one JSON object a line for a collector.

Neither holds what was said: prompts, answers and keys stay out of every message, at every level.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is being answered, wherever it is."""

_TEXT = "%(asctime)s %(levelname)s {process}%(name)s: %(message)s"


def configure_logging(level: str, form: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """Send all that this process logs to stderr. `process`: what it is called; the gateway goes without in lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    called = "" if process == "gateway" else f"{process} "
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(_TEXT.format(process=called)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """Objects with `time` (RFC 3339, UTC), `level`, `logger`, `process`, `message`; `request_id` where there is one.

    A record's `fields` (by `extra`) are members of their own; `error` is a traceback.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogWriter(io.StringIO):
    """A file whose lines are logged, for what would print otherwise."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self._log.info("%s", line.strip())
        return len(text)
