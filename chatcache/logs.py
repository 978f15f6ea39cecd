"""Logging to stderr, as text for people or as JSON lines for a log collector.

No message at any level contains prompts, answers or API keys.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task is answering."""

_TEXT = "%(asctime)s %(levelname)s {process}%(name)s: %(message)s"


def configure_logging(level: str, form: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """Send all log records of this process to stderr, and ignore a closed stderr from now on.

    Records are marked with the name of the process, except text lines of the gateway.
    """
    if (own := sys.__stderr__) is not None and sys.stderr is own:
        raw = io.BufferedWriter(LossyFile(own.fileno(), "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, own.encoding, own.errors, line_buffering=True)
    handler = logging.StreamHandler(stream or sys.stderr)
    prefix = "" if process == "gateway" else f"{process} "
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(_TEXT.format(process=prefix)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class LossyFile(io.FileIO):
    """A file whose writes never fail: text for a closed terminal, a closed pipe or a full disk is lost.

    A server writes to stderr while it starts, loads, fails, drains and exits; none of that may depend on the terminal.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class JsonFormatter(logging.Formatter):
    """Format log records as JSON objects.

    Members: `time` (RFC 3339, UTC), `level`, `logger`, `process`, `message`. Adds `request_id` within a request, the
    members of the record's `fields` (set with `extra`), and the traceback of an exception as `error`.
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
    """A writable text stream that logs each line, for libraries that print to the console."""

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
