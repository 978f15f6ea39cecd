"""The program of the grammar checker's child: compile what comes in, say how it went, die if it takes too much.

Compiling a grammar can take any time and memory, and a deep one overflows the stack; no library limit stops all three.
Here the kernel does. Run by its path; imports nothing of the package. Frames both ways: length (uint32, little-endian),
then UTF-8 text. Sends "ready", then one answer per grammar: "" or the library's reason.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

try:
    import resource
except ImportError:  # not a POSIX system: only the parent's clock bounds a compile there
    resource = None  # type: ignore[assignment]

NUM_STEPS = 48
FIRST_NAMED, NUM_NAMED = 257, 16
TRIED = (*range(256), *range(FIRST_NAMED, FIRST_NAMED + NUM_NAMED))
MAX_IDLE_BYTES = 192 << 20
IDLE_S = 300


class ByteTokens:
    """The smallest vocabulary: one token a byte, an end, and some special tokens that a grammar may name."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", *(b"<%d>" % n for n in range(NUM_NAMED)))
    special_token_ids = tuple(range(256, 257 + NUM_NAMED))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    import llguidance

    tokenizer = llguidance.LLTokenizer(ByteTokens(), eos_token=[ByteTokens.eos_token_id], slices=[])
    limits = llguidance.LLParserLimits(**spec["limits"])
    if resource is not None:
        used = int(_status_field(0))
        most = used + spec["memory_bytes"] if used else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(spec["stack_bytes"])
    write_frame(sys.stdout.buffer, "ready")
    while True:
        _alarm("ITIMER_REAL", IDLE_S)
        text = read_frame(sys.stdin.buffer)
        _alarm("ITIMER_REAL", 0)
        if text is None:
            return
        _alarm("ITIMER_PROF", spec["cpu_s"])
        answer = _in_thread(llguidance.LLMatcher, tokenizer, text, limits)
        _alarm("ITIMER_PROF", 0)
        write_frame(sys.stdout.buffer, answer)
        if _status_field(1) > MAX_IDLE_BYTES:
            return


def _in_thread(matcher: Any, tokenizer: Any, text: str, limits: Any) -> str:
    """Try a grammar on a stack of the size given; one that needs more ends the process."""
    answers: list[str] = []

    def run() -> None:
        try:
            answers.append(_try(matcher(tokenizer, text, log_level=0, limits=limits)))
        except MemoryError:
            os._exit(1)
        except Exception as error:
            answers.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


def _try(matcher: Any) -> str:
    """Return why a compiled grammar is of no use; take a few steps through it, as decoding will."""
    words = (ctypes.c_uint8 * 36)()
    address = ctypes.addressof(words)
    rng = random.Random(0)
    for step in range(NUM_STEPS):
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(address, len(words))
        if matcher.is_error():
            return str(matcher.get_error()) if step == 0 else ""
        allowed = [token for token in TRIED if words[token // 8] >> token % 8 & 1]
        if not allowed or not matcher.consume_token(rng.choice(allowed)):
            return ""
    matcher.deep_copy()
    return ""


def _alarm(timer: str, seconds: float) -> None:
    """End this process when a timer, of real time (ITIMER_REAL) or of computing (ITIMER_PROF), runs out; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(getattr(signal, timer), seconds)


def _status_field(index: int) -> int:
    """Return this process's address space (0) or resident memory (1) in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[index]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def read_frame(stream: BinaryIO) -> str | None:
    """Return the next text, None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    body = stream.read(size)
    return body.decode() if len(body) == size else None


def write_frame(stream: BinaryIO, text: str) -> None:
    """Send a text."""
    body = text.encode("utf-8", "replace")
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    main()
