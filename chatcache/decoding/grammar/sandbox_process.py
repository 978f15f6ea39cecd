"""Child process of the grammar sandbox.

Compile the grammars it receives and report the result.

Compiling may take any time and memory, and a deep grammar overflows the stack; resource limits of the kernel stop all
three. Run by its path; imports nothing from the package. Frames in both directions: length (uint32, little-endian),
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
except ImportError:  # not POSIX: only the parent's timeout applies
    resource = None  # type: ignore[assignment]

NUM_STEPS = 48
FIRST_NAMED, NUM_NAMED = 257, 16
TRIED = (*range(256), *range(FIRST_NAMED, FIRST_NAMED + NUM_NAMED))
MAX_IDLE_BYTES = 192 << 20
IDLE_S = 300


class ByteTokens:
    """Minimal vocabulary.

    One token per byte, EOS, and special tokens that a grammar may reference.
    """

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", *(b"<%d>" % n for n in range(NUM_NAMED)))
    special_token_ids = tuple(range(256, 257 + NUM_NAMED))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Answer grammars on stdin until it is closed, idle for long, or memory has grown."""
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
    """Compile a grammar on a thread with the limited stack; an overflow ends the process."""
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
    """Run a few decoding steps; return the error of the initial state, "" if there is none."""
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
    """Set the timer that ends this process.

    Real time (ITIMER_REAL) or CPU time (ITIMER_PROF); 0 disables it.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(getattr(signal, timer), seconds)


def _status_field(index: int) -> int:
    """Return the address space (0) or resident memory (1) of this process in bytes.

    0 if unknown.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[index]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def read_frame(stream: BinaryIO) -> str | None:
    """Read the next frame; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    body = stream.read(size)
    return body.decode() if len(body) == size else None


def write_frame(stream: BinaryIO, text: str) -> None:
    """Write a text as one frame."""
    body = text.encode("utf-8", "replace")
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    main()
