"""Put in front of a server's path by tests: reading a pickle, or a connection to anywhere else, is an error there.

What was tried is written to the file that CHATCACHE_TEST_TRIED names, a line each, so that a caught error shows too.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

# Compiled kernels, which numba keeps in a folder that only this user can write: code by nature.
KERNELS = ("/numba/core/caching.py", "/numba/core/serialize.py")
TRIED = os.environ["CHATCACHE_TEST_TRIED"]


def _is_kernel() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(KERNELS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _refuse(what: str) -> None:
    frames = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(traceback.extract_stack(limit=8)[:-2]))
    with open(TRIED, "a", encoding="utf-8") as file:
        file.write(f"{what} from {frames}\n")
    raise RuntimeError(f"refused: {what}")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto") and not _is_near(args[1]):
        _refuse(f"{event} {args[1]!r}")
    elif event == "os.system" or (event == "pickle.find_class" and not _is_kernel()):
        _refuse(f"{event} {args!r:.100}")
    elif event == "socket.getaddrinfo" and args[0] not in (None, "", "localhost", "127.0.0.1", "0.0.0.0", "::1"):
        _refuse(f"{event} {args[0]!r}")


def _is_near(address: Any) -> bool:
    if isinstance(address, str | bytes):  # AF_UNIX
        return True
    return isinstance(address, tuple) and str(address[0]) in ("127.0.0.1", "::1", "localhost")


def _unless_kernel(real: Any, what: str) -> Any:
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _is_kernel():
            _refuse(what)
        return real(*args, **kwargs)

    return checked


sys.addaudithook(_audit)
for _name in ("load", "loads", "Unpickler"):
    setattr(pickle, _name, _unless_kernel(getattr(pickle, _name), f"pickle.{_name}"))

if os.environ.get("CHATCACHE_TEST_PLANT"):  # a server with the faults that the test is there to find

    def _plant() -> None:
        import contextlib
        import socket

        with contextlib.suppress(RuntimeError):
            pickle.loads(pickle.dumps(1))  # noqa: S301
        with contextlib.suppress(RuntimeError, OSError), socket.socket() as one:
            one.connect(("192.0.2.1", 9))
        listener = socket.socket()
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        globals()["_kept"] = listener

    _plant()
