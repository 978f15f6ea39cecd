"""Conversations with an echo server and the answers that RFC 6455 requires.

Each conversation has the number of the equivalent Autobahn case, so that results can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.gateway.conformance.conversation import (
    BINARY,
    CLOSE,
    CONT,
    LOOK,
    NAMES,
    NO_STATUS,
    OPEN,
    PING,
    PONG,
    TEXT,
    Case,
    Event,
    close,
    frame,
)
from tests.gateway.conformance.utf8 import INVALID, KOSME, MIXED, VALID

NORMAL, PROTOCOL_ERROR, BAD_PAYLOAD = 1000, 1002, 1007
HELLO = frame(TEXT, b"Hello")
RECEIVED_HELLO: Event = ("text", b"Hello")
MAY_DROP: frozenset[int | None] = frozenset(
    {None}
)  # RFC 6455, 7.1.7: the server SHOULD send a Close first, but need not
SIZES = (0, 125, 126, 127, 128, 65535, 65536)


def answered(name: str, *frames: bytes, events: Sequence[Event], chop: int = 0, framewise: bool = False) -> Case:
    """Case in which the server sends all `events`, then the client closes."""
    said = frames if framewise else (b"".join(frames),)
    return Case(name, (*said, len(events), close(NORMAL)), tuple(events), frozenset({NORMAL}), chop=chop)


def refused(
    name: str,
    *frames: bytes,
    events: Sequence[Event] = (),
    codes: Sequence[int] = (PROTOCOL_ERROR,),
    chop: int = 0,
    framewise: bool = False,
) -> Case:
    """Case in which the server closes because of a protocol violation.

    Valid frames before the violation need not be answered. A server that detects no violation answers the client's
    Close.
    """
    said = (*frames, close(NORMAL))
    prefixes = tuple(tuple(events[:end]) for end in range(len(events)))
    script = said if framewise else (b"".join(said),)
    return Case(name, script, tuple(events), frozenset(codes), prefixes, MAY_DROP, chop)


def closed(name: str, *frames: bytes, codes: Sequence[int] = (NORMAL,)) -> Case:
    """Case in which the client closes first; the server answers only the Close, no later frame."""
    return Case(name, (b"".join(frames),), (), frozenset(codes))


def fragments(payloads: Sequence[bytes], opcode: int = TEXT) -> list[bytes]:
    last = len(payloads) - 1
    return [frame(CONT if at else opcode, part, fin=at == last) for at, part in enumerate(payloads)]


def sizes() -> Iterator[Case]:
    for section, opcode, octet in (("1.1", TEXT, b"*"), ("1.2", BINARY, b"\xfe")):
        for number, (size, chop) in enumerate([*((size, 0) for size in SIZES), (SIZES[-1], 997)], 1):
            sent = frame(opcode, octet * size)
            yield answered(f"{section}.{number}", sent, events=[(NAMES[opcode], octet * size)], chop=chop)
    text = b"*" * 65536
    pieces = [text[at : at + 1300] for at in range(0, len(text), 1300)]
    yield answered("10.1.1", *fragments(pieces), events=[("text", text)])


def pings() -> Iterator[Case]:
    for number, payload in enumerate([b"", b"Hello, world!", b"\x00\xff\xfe\xfd\xfc\xfb\x00\xff", b"\xfe" * 125], 1):
        yield answered(f"2.{number}", frame(PING, payload), events=[("pong", payload)])
    yield refused("2.5", frame(PING, b"\xfe" * 126))
    yield answered("2.6", frame(PING, b"\xfe" * 125), events=[("pong", b"\xfe" * 125)], chop=1)
    yield answered("2.7", frame(PONG), events=[])
    yield answered("2.8", frame(PONG, b"unsolicited"), events=[])
    yield answered("2.9", frame(PONG, b"unsolicited"), frame(PING, b"asked"), events=[("pong", b"asked")])
    many = [b"ping %d" % number for number in range(10)]
    for name, chop in (("2.10", 0), ("2.11", 1)):
        pongs = [("pong", payload) for payload in many]
        yield answered(name, *(frame(PING, payload) for payload in many), events=pongs, chop=chop)


def reserved() -> Iterator[Case]:
    """Reserved bits and opcodes."""
    ping = frame(PING)
    for rsv, chop, framewise in ((2, 0, False), (3, 0, True), (4, 1, False)):
        corrupted = frame(TEXT, b"Hello", rsv=rsv)
        echoed = [RECEIVED_HELLO]
        yield refused(f"3.{rsv}", HELLO, corrupted, ping, events=echoed, chop=chop, framewise=framewise)
    for rsv, opcode in ((1, TEXT), (5, BINARY), (6, PING)):
        yield refused(f"3.{rsv}", frame(opcode, b"Hello", rsv=rsv))
    yield refused("3.7", frame(CLOSE, b"\x03\xe8", rsv=7))
    for section, first in (("4.1", 3), ("4.2", 11)):
        for number in range(5):
            corrupted = frame(first + number, b"reserved" if number % 2 or number == 4 else b"")
            if number < 2:
                yield refused(f"{section}.{number + 1}", corrupted)
            else:
                yield refused(f"{section}.{number + 1}", HELLO, corrupted, ping, events=[RECEIVED_HELLO])


def fragmented() -> Iterator[Case]:
    one, two = fragments([b"frag", b"ment"])
    whole, ping, pong = ("text", b"fragment"), frame(PING, b"between"), ("pong", b"between")
    for name, opcode in (("5.1", PING), ("5.2", PONG)):
        yield refused(name, frame(opcode, b"frag", fin=False), ping, frame(CONT, b"ment"))
    ways = ((0, False), (0, True), (1, False))  # at once, frame by frame, octet by octet
    for number, (chop, framewise) in enumerate(ways):
        yield answered(f"5.{3 + number}", one, two, events=[whole], chop=chop, framewise=framewise)
        yield answered(f"5.{6 + number}", one, ping, two, events=[pong, whole], chop=chop, framewise=framewise)
        for first, fin in ((9, True), (12, False)):
            stray = frame(CONT, b"nothing to continue", fin=fin)
            yield refused(f"5.{first + number}", stray, HELLO, chop=chop, framewise=framewise)
    yield refused("5.15", one, two, frame(CONT, b"more", fin=False), HELLO, events=[whole])
    for name, fin in (("5.16", False), ("5.17", True)):
        yield refused(name, *[frame(CONT, b"more", fin=fin), one, two] * 2)
    yield refused("5.18", one, frame(TEXT, b"ment"))
    parts, events = fragments([b"a", b"b", b"c", b"d", b"e"]), [("pong", b"1"), ("pong", b"2"), ("text", b"abcde")]
    for name, chop in (("5.19", 0), ("5.20", 1)):
        begun, more = b"".join([*parts[:2], frame(PING, b"1")]), b"".join([*parts[2:4], frame(PING, b"2")])
        script = (begun, 1, more, 2, parts[4], 3, close(NORMAL))
        yield Case(name, script, tuple(events), frozenset({NORMAL}), chop=chop)


def texts() -> Iterator[Case]:
    mixed = "Hello-µ@ßöäüàá-UTF-8!!".encode()
    for name, parts in {
        "6.1.1": [b""],
        "6.1.2": [b"", b"", b""],
        "6.1.3": [b"", b"middle", b""],
        "6.2.1": [mixed],
        "6.2.2": [mixed[:12], mixed[12:]],
        "6.2.3": [bytes([octet]) for octet in mixed],
        "6.2.4": [bytes([octet]) for octet in KOSME],
    }.items():
        yield answered(name, *fragments(parts), events=[("text", b"".join(parts))])
    corrupted = KOSME + b"\xed\xa0\x80" + b"edited"
    yield refused("6.3.1", frame(TEXT, corrupted), codes=[BAD_PAYLOAD])
    yield refused("6.3.2", *fragments([bytes([octet]) for octet in corrupted]), codes=[BAD_PAYLOAD])
    for group, payloads in (VALID | MIXED | INVALID).items():
        for number, payload in enumerate(payloads, 1):
            name = f"{group}.{number}"
            if group in VALID or (group in MIXED and number in MIXED_VALID[group]):
                yield answered(name, frame(TEXT, payload), events=[("text", payload)])
            else:
                yield refused(name, frame(TEXT, payload), codes=[BAD_PAYLOAD])


MIXED_VALID = {"6.6": (2, 5, 7, 9, 11), "6.11": (1, 2, 3, 4)}


def corrupted_early() -> Iterator[Case]:
    """Text with invalid UTF-8 before its last octet.

    Strict servers close at the invalid octet, others at the end of the message.
    """
    beyond = b"\xf4\x90\x80\x80"  # U+110000
    for number, at in ((1, 0), (2, 1)):
        parts = [KOSME + beyond[:at], beyond[at : 2 if at else 4], beyond[2 if at else 4 :] + b"edited"]
        one, two, three = fragments(parts)
        script = (one + frame(PING, b"good"), 1, two + frame(PING, b"bad"), 2, three + close(NORMAL))
        strict, lax = (("pong", b"good"),), (("pong", b"good"), ("pong", b"bad"))
        yield Case(f"6.4.{number}", script, strict, frozenset({BAD_PAYLOAD}), (lax,), MAY_DROP)
        whole, end = frame(TEXT, b"".join(parts)), -len(parts[2])
        middle = end - len(parts[1])
        script = (
            whole[:middle],
            LOOK,
            whole[middle:end],
            LOOK,
            whole[end:] + close(NORMAL),
        )  # no Ping can be sent within a frame
        yield Case(f"6.4.{number + 2}", script, (OPEN,), frozenset({BAD_PAYLOAD}), ((OPEN, OPEN),), MAY_DROP)


def ends() -> Iterator[Case]:
    bye, ping = close(NORMAL), frame(PING, b"late")
    one, two = fragments([b"frag", b"ment"])
    yield answered("7.1.1", HELLO, events=[RECEIVED_HELLO])
    for number, frames in enumerate(([bye, bye], [bye, ping], [bye, HELLO], [one, bye, two]), 2):
        yield closed(f"7.1.{number}", *frames)
    large = b"Large text" * 26214
    events: list[Event] = [("text", large), RECEIVED_HELLO]
    some = tuple(tuple(events[:end]) for end in range(2))  # it may have closed before it echoed all
    sent = frame(TEXT, large) + HELLO + bye + ping
    yield Case("7.1.6", (sent,), tuple(events), frozenset({NORMAL}), some)
    yield closed("7.3.1", frame(CLOSE), codes=[NORMAL, NO_STATUS])
    yield refused("7.3.2", frame(CLOSE, b"\x03"))
    for number, reason in ((3, b""), (4, b"Hello"), (5, b"x" * 123)):
        yield closed(f"7.3.{number}", close(NORMAL, reason))
    yield refused("7.3.6", close(NORMAL, b"x" * 124))
    yield refused("7.5.1", close(NORMAL, KOSME + b"\xed\xa0\x80"), codes=[PROTOCOL_ERROR, BAD_PAYLOAD])
    good = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
    for number, code in enumerate(good, 1):
        yield closed(f"7.7.{number}", close(code), codes=[code, NORMAL])
    for number, code in enumerate((0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999), 1):
        yield refused(f"7.9.{number}", close(code))
    for number, code in enumerate((5000, 65535), 1):  # not specified by the RFC
        yield refused(f"7.13.{number}", close(code), codes=[PROTOCOL_ERROR, NORMAL, code])


CASES: tuple[Case, ...] = (
    *sizes(),
    *pings(),
    *reserved(),
    *fragmented(),
    *texts(),
    *corrupted_early(),
    *ends(),
)
