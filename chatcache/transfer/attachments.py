"""The text of files for messages: text files are decoded, PDFs are read in a process of their own.

The errors name the limits.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from chatcache.conversations.file_blocks import file_block
from chatcache.errors import InvalidRequestError

MAX_FILE_BYTES = 16 << 20
MAX_TEXT_CHARS = 2_000_000
MAX_PDF_PAGES = 1000
MAX_NAME_CHARS = 255
MAX_KEPT_CHARS = 8_000_000
PDF_CPU_S = 20
PDF_WALL_S = 60.0  # on a busy machine
PDF_MEMORY_BYTES = 1 << 30

_PDF_CHILD = Path(__file__).with_name("pdf_child.py")
_OUT_OF_TIME = {-number for name in ("SIGXCPU", "SIGKILL") if (number := getattr(signal, name, 0))}
_PDF_MARK = b"%PDF-"
_PDF_MARK_WITHIN = 1024  # bytes, as readers of PDFs accept it
_PDF_LINE = re.compile(rb"(?:\A|[\r\n])%PDF-\d")
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_BREAKS = re.compile(r"\r\n?|[\u2028\u2029\x85]")
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f\u2028\u2029\x85]+")


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file. `num_pages`: of a PDF."""

    name: str
    text: str
    num_pages: int | None = None

    @property
    def block(self) -> str:
        """The part of a message that contains the file; it ends with a line break."""
        return file_block(self.name, self.text)


class FileTexts:
    """The texts of the files read last, by owner and content, of `max_chars` in all."""

    def __init__(self, max_chars: int = MAX_KEPT_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._files: dict[tuple[str, bytes], FileText] = {}

    def find(self, owner: str, digest: bytes) -> FileText | None:
        """Return a file that the owner has sent before."""
        found = self._files.pop((owner, digest), None)
        if found is not None:
            self._files[owner, digest] = found  # the newest is last
        return found

    def add(self, owner: str, digest: bytes, file: FileText) -> None:
        """Keep a file, and drop the oldest beyond the limit."""
        if self.find(owner, digest) is not None:
            return
        self._files[owner, digest] = file
        self._num_chars += len(file.text)
        while self._num_chars > self._max_chars:
            self._num_chars -= len(self._files.pop(next(iter(self._files))).text)


def clean_name(name: str) -> str:
    """Return the last part of a path on one line. Raises: InvalidRequestError."""
    last = _NOT_IN_NAMES.sub(" ", name).replace("\\", "/").rstrip("/ ").rpartition("/")[2].strip()
    if len(last) > MAX_NAME_CHARS:
        raise _unreadable("the name of the file", f"has {len(last)} characters; the limit is {MAX_NAME_CHARS}")
    return last or "file"


def is_pdf(data: bytes) -> bool:
    """Whether the file is a PDF, whatever its name says; a text that names the mark within a line is none."""
    head = data[:_PDF_MARK_WITHIN]
    return _PDF_LINE.search(head) is not None or (_PDF_MARK in head and b"\0" in data)


def check_size(name: str, num_bytes: int) -> None:
    """Check the size of a file. Raises: InvalidRequestError naming the limit."""
    if num_bytes > MAX_FILE_BYTES:
        raise _unreadable(name, f"has {num_bytes} bytes; the limit is {MAX_FILE_BYTES >> 20} MiB")


def read_file(name: str, data: bytes) -> FileText:
    """Return the text of a file; takes seconds for a long PDF. Raises: InvalidRequestError naming the limit."""
    check_size(name, len(data))
    if is_pdf(data):
        return _read_pdf(name, data)
    text = _decode(name, data)
    text = _BREAKS.sub("\n", text.removeprefix("\ufeff")).rstrip("\n")
    if not text.strip():
        raise _unreadable(name, "is empty")
    if len(text) > MAX_TEXT_CHARS:
        raise _unreadable(name, f"has {len(text)} characters; the limit is {MAX_TEXT_CHARS}")
    return FileText(name, text)


def _decode(name: str, data: bytes) -> str:
    """Decode UTF-8, UTF-16 with a byte order mark, or else Windows-1252."""
    encodings = ("utf-16",) if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8", "cp1252")
    for encoding in encodings:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if not _BINARY.search(text):
            return text
        break
    raise _unreadable(name, "is a binary file; only text files and PDFs are read")


def _read_pdf(name: str, data: bytes) -> FileText:
    limits = {
        "cpu_s": PDF_CPU_S,
        "memory_bytes": PDF_MEMORY_BYTES,
        "max_pages": MAX_PDF_PAGES,
        "max_chars": MAX_TEXT_CHARS,
    }
    command = [sys.executable, "-P", str(_PDF_CHILD), json.dumps(limits)]
    try:
        done = subprocess.run(
            command, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PDF_WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unreadable(name, f"takes more than the limit of {PDF_WALL_S:g} s to read") from None
    if done.returncode in _OUT_OF_TIME:
        raise _unreadable(name, f"takes more than the limit of {PDF_CPU_S} s of computing to read")
    if done.returncode or not done.stdout:
        raise _unreadable(name, "is not a readable PDF: the reader ended")
    result = json.loads(done.stdout)
    if "error" in result:
        raise _unreadable(name, result["error"])
    text = result["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = _BINARY.sub("", _BREAKS.sub("\n", text))
    return FileText(name, text, result["num_pages"])


def _unreadable(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {problem}", code="unreadable_file")
