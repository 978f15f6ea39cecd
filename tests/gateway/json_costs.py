"""`python -m tests.gateway.json_costs`: process time of strict decoding, next to msgspec's in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from chatcache.gateway.json_codec import decode_object
from loadtest.attacks.json_bodies import BODIES


def _process_ms(decode: Callable[[bytes], object], body: bytes) -> float:
    times = []
    for _ in range(5):
        start_s = time.process_time()
        decode(body)
        times.append(time.process_time() - start_s)
    return 1000 * min(times)


def main() -> None:
    """Print the least process time of each body in milliseconds."""
    print(f"{'body':22} {'MB':>5} {'strict':>8} {'msgspec':>8} {'ratio':>6}")
    for name, body in BODIES.items():
        strict_ms, plain_ms = _process_ms(decode_object, body), _process_ms(msgspec.json.decode, body)
        print(f"{name:22} {len(body) / 1e6:5.2f} {strict_ms:8.2f} {plain_ms:8.2f} {strict_ms / plain_ms:6.1f}")


if __name__ == "__main__":
    main()
