"""Octets that are UTF-8, and octets that only look like it, by the rule that each breaks."""

from __future__ import annotations

KOSME = "κ\u1f79σμε".encode()  # characters of two octets, and one of three


def octets(value: int, size: int) -> bytes:
    """`value` by UTF-8's scheme in `size` octets, whether UTF-8 allows it or not."""
    rest = [0x80 | value >> 6 * at & 0x3F for at in range(size - 1)]
    return bytes([0xFF00 >> size & 0xFF | value >> 6 * (size - 1), *reversed(rest)])


MOST = {2: 0x7FF, 3: 0xFFFF, 4: 0x1FFFFF, 5: 0x3FFFFFF, 6: 0x7FFFFFFF}  # that fits so many octets
LEADS = {2: range(0xC0, 0xE0), 3: range(0xE0, 0xF0), 4: range(0xF0, 0xF8), 5: range(0xF8, 0xFC), 6: range(0xFC, 0xFE)}
HIGH, LOW = (0xD800, 0xDB7F, 0xDB80, 0xDBFF), (0xDC00, 0xDFFF)
CUT = [*(octets(0, size)[:-1] for size in MOST), *(octets(most, size)[:-1] for size, most in MOST.items())]

VALID: dict[str, list[bytes]] = {
    "6.5": [*(f"hello{middle}world".encode() for middle in "$§€𤭢"), KOSME],
    "6.7": [chr(least).encode() for least in (0, 0x80, 0x800, 0x10000)],
    "6.9": [chr(most).encode() for most in (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)],
    # No characters, but text may hold them.
    "6.22": [chr(plane << 16 | end).encode() for plane in range(17) for end in (0xFFFE, 0xFFFF)],
    "6.23": [chr(value).encode() for value in range(0xFFF9, 0x10000)],
}
MIXED: dict[str, list[bytes]] = {
    "6.6": [KOSME[:end] for end in range(1, len(KOSME) + 1)],
    # About the surrogates, about the last code point.
    "6.11": [*(chr(value).encode() for value in (0xD7FF, 0xE000, 0xFFFD, 0x10FFFF)), octets(0x110000, 4)],
}
INVALID: dict[str, list[bytes]] = {
    "6.8": [octets(0x200000, 5), octets(0x4000000, 6)],
    "6.10": [octets(MOST[size], size) for size in (4, 5, 6)],
    # Continuations of nothing.
    "6.12": [b"\x80", b"\xbf", *((b"\x80\xbf" * 3)[:size] for size in range(2, 7)), bytes(range(0x80, 0xC0))],
    "6.13": [b"".join(bytes([lead]) + b" " for lead in leads) for leads in LEADS.values()],
    "6.14": CUT,
    "6.15": [b"".join(CUT)],
    "6.16": [b"\xfe", b"\xff", b"\xfe\xfe\xff\xff"],
    # Longer than need be: a slash, the most that fits one octet less, nought.
    "6.17": [octets(0x2F, size) for size in MOST],
    "6.18": [octets(most, size) for size, most in zip(MOST, (0x7F, *MOST.values()), strict=False)],
    "6.19": [octets(0, size) for size in MOST],
    "6.20": [octets(value, 3) for value in (*HIGH, 0xDC00, 0xDF80, 0xDFFF)],
    "6.21": [octets(high, 3) + octets(low, 3) for high in HIGH for low in LOW],
}
