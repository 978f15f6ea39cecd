"""Check a recorded history against the guarantees of the server and list all violations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.chaos.history import Entry
from tests.chaos.tagged_text import fault_in, length_of, tag_of, user_message

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken guarantee; `rule` is a keyword for its kind."""

    rule: str
    t: float
    what: str


@dataclass(slots=True)
class Response:
    """Observations of one response, over all of its streams."""

    op: str
    frames: dict[int, Entry] = field(default_factory=dict)
    ends: list[Entry] = field(default_factory=list)


class Checker:
    """Checks a complete history; `violations` is empty if every guarantee holds."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_kind: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._by_kind[entry["kind"]].append(entry)
        self._asked = {entry["op"]: entry for entry in reversed(self._by_kind["invoke"])}  # the first of each
        self._op_of_tag = {entry["tags"][-1]: op for op, entry in self._asked.items()}
        self._streams = {entry["stream"]: entry for entry in self._by_kind["open"]}
        self._responses: dict[str, Response] = {}
        for entry in self._by_kind["ack"]:
            self._responses.setdefault(entry["response"], Response(entry["op"]))
        for entry in self._by_kind["ended"]:
            self._responses.setdefault(entry["response"], Response(entry["op"])).ends.append(entry)
        self._items = {item["id"]: item for entry in self._by_kind["stored"] for item in entry["items"]}
        self._end_s = max((entry["t"] for of_kind in self._by_kind.values() for entry in of_kind), default=0.0)

    def violations(self) -> list[Violation]:
        found = [*self._streams_in_order(), *self._acks(), *self._ends(), *self._refusals()]
        if self._by_kind["stored"]:
            found += [*self._stored_turns(), *self._stored_texts()]
        found += [Violation("hung", entry["t"], f"{entry['op']} never ends") for entry in self._by_kind["hung"]]
        for entry in self._by_kind["ledger"]:
            found += [Violation("ledger", entry["t"], f"{entry['gateway']}: {each}") for each in entry["problems"]]
        return sorted(found, key=lambda each: each.t)

    def num_checked(self) -> dict[str, int]:
        """Return how many items of each kind were checked."""
        return {
            "acknowledged turns": len({entry["op"] for entry in self._by_kind["ack"]}),
            "ended responses": sum(bool(response.ends) for response in self._responses.values()),
            "frames": len(self._by_kind["frame"]),
            "streams": len(self._streams),
            "refusals": len(self._by_kind["refused"]),
            "stored messages": len(self._items),
            "faults": sum(entry["phase"] == "begin" for entry in self._by_kind["fault"]),
        }

    # -- streams ----------------------------------------------------------------------------------------------------

    def _streams_in_order(self) -> Iterator[Violation]:
        """Check that frame numbers have no gap, streams end once, readers agree and texts join."""
        frames: dict[str, list[Entry]] = defaultdict(list)
        for entry in (*self._by_kind["frame"], *self._by_kind["jump"]):
            frames[entry["stream"]].append(entry)
        closes = {entry["stream"]: entry for entry in self._by_kind["close"]}
        for name, opened in self._streams.items():
            seen = sorted(frames[name], key=lambda entry: entry["t"])
            yield from self._one_stream(name, opened, seen, closes.get(name))
        for response_id, response in self._responses.items():
            yield from self._joined(response_id, response)

    def _one_stream(self, name: str, opened: Entry, seen: list[Entry], close: Entry | None) -> Iterator[Violation]:
        response = self._responses.setdefault(opened["response"], Response(opened["op"]))
        at = opened["after"]
        is_over = False
        for entry in seen:
            what = f"{opened['response']} ({opened['op']}), stream {name}"
            if is_over:
                yield Violation("terminal", entry["t"], f"{what}: frame {entry['seq']} follows the terminal frame")
            if entry["kind"] == "frame" and entry["seq"] != at + 1:
                rule = "gap" if entry["seq"] > at else "repeat"
                yield Violation(rule, entry["t"], f"{what}: frame {entry['seq']} follows {at}")
            at = entry["seq"]
            if entry["kind"] == "jump":
                continue
            is_over = is_over or entry["type"] in TERMINAL
            other = response.frames.setdefault(at, entry)
            if (other["type"], other["index"], other["text"]) != (entry["type"], entry["index"], entry["text"]):
                yield Violation("frames", entry["t"], f"{what}: frame {at} differs from the frame of another stream")
        if close is not None and close["how"] == "end" and not is_over:
            yield Violation("terminal", close["t"], f"{opened['response']}: its stream ended without a terminal frame")

    def _joined(self, response_id: str, response: Response) -> Iterator[Violation]:
        """Compare joined deltas with the requested text, the `.done` frame and the final response."""
        texts: dict[int, str] = defaultdict(str)
        asked = self._asked[response.op]
        for seq, entry in enumerate(response.frames[key] for key in sorted(response.frames)):
            if entry["seq"] != seq:
                return  # no reader received the frame before
            if entry["type"] == "response.output_text.delta":
                texts[entry["index"]] += entry["text"]
            elif entry["type"] == "response.output_text.done" and entry["text"] != texts[entry["index"]]:
                difference = f"{response_id}: deltas make {texts[entry['index']]!r}, done has {entry['text']!r}"
                yield Violation("text", entry["t"], difference)
        for index, text in texts.items():
            fault = fault_in(text, asked["tags"], asked["words"])
            if fault is not None:
                when = next(entry["t"] for entry in response.frames.values() if entry["index"] == index)
                yield Violation("foreign", when, f"{response_id} candidate {index}: {fault}")
            for end in response.ends:
                whole = list(end["texts"].values())
                if is_ended_well(end) and (index >= len(whole) or not whole[index].startswith(text)):
                    yield Violation("text", end["t"], f"{response_id} candidate {index}: final text lacks {text!r}")

    # -- guarantees ------------------------------------------------------------------------------------------------

    def _acks(self) -> Iterator[Violation]:
        """Check that one idempotency key makes one response."""
        first: dict[str, str] = {}
        for entry in self._by_kind["ack"]:
            before = first.setdefault(entry["op"], entry["response"])
            if before != entry["response"]:
                yield Violation("doubled", entry["t"], f"{entry['op']} is {before} and {entry['response']}")

    def _ends(self) -> Iterator[Violation]:
        """Check that every final response has the requested text, the same for all readers, and did not fail."""
        for response_id, response in self._responses.items():
            asked = self._asked[response.op]
            statuses = {end["status"] for end in response.ends if end["status"] != "in_progress"}
            if len(statuses) > 1:
                yield Violation("terminal", response.ends[-1]["t"], f"{response_id} ended as {sorted(statuses)}")
            for end in response.ends:
                for text in end["texts"].values():
                    fault = fault_in(text, asked["tags"], asked["words"])
                    if fault is not None:
                        yield Violation("foreign", end["t"], f"{response_id}: {fault}")
                lengths = [len(text) for text in end["texts"].values()]
                wanted = [length_of(asked["tags"][-1], asked["words"])] * asked["n"]
                if end["status"] == "completed" and lengths != wanted:
                    yield Violation(
                        "text", end["t"], f"{response_id} completed with {lengths} characters, not {wanted}"
                    )
                deleted = any(entry["op"] == end["op"] for entry in self._by_kind["delete"])
                if end["status"] == "failed" and not deleted:
                    yield Violation("failed", end["t"], f"{response_id} failed: no fault may cause that")

    def _refusals(self) -> Iterator[Violation]:
        """Check that requests are refused with 429 or 503 only."""
        for entry in self._by_kind["refused"]:
            if entry["status"] not in (429, 503):
                yield Violation("refused", entry["t"], f"{entry['op']}: {entry['status']} {entry['code']}")

    # -- stored data ------------------------------------------------------------------------------------------------

    def _stored_turns(self) -> Iterator[Violation]:
        """Check that acknowledged turns are stored once and deleted turns are not stored."""
        stored = Counter(tag_of(item["text"]) for item in self._items.values() if item["role"] == "user")
        delete_requested = {entry["op"] for entry in self._by_kind["delete"]}
        gone = {entry["op"] for entry in self._by_kind["delete"] if entry["done"] and entry["conversation"]}
        for tag_and_words, count in stored.items():
            op = self._op_of_tag.get(tag_and_words[0]) if tag_and_words is not None else None
            if op is None:
                yield Violation("foreign", self._end_s, f"the stored message {tag_and_words} was never sent")
            elif count > 1:
                yield Violation("doubled", self._asked[op]["t"], f"{op} is stored {count} times")
            elif op in gone:
                yield Violation("revived", self._asked[op]["t"], f"{op} was deleted and is still stored")
        for entry in self._by_kind["ack"]:
            asked = self._asked[entry["op"]]
            if not stored[asked["tags"][-1], asked["words"]] and entry["op"] not in delete_requested:
                yield Violation(
                    "lost", entry["t"], f"{entry['op']} was acknowledged as {entry['response']} and is lost"
                )

    def _stored_texts(self) -> Iterator[Violation]:
        """Check that stored replies equal the sent ones and answer the message that they follow."""
        by_response: dict[str, list[Entry]] = defaultdict(list)
        for item in self._items.values():
            if item["role"] == "assistant" and item["response_id"] and item["finish_reason"] != "fork":
                by_response[item["response_id"]].append(item)
            if item["role"] == "assistant":
                yield from self._one_reply(item)
        delete_requested = {entry["op"] for entry in self._by_kind["delete"]}
        for response_id, response in self._responses.items():
            for end in response.ends:
                if not is_ended_well(end) or not end["saved"] or response.op in delete_requested:
                    continue
                for item_id, text in end["texts"].items():
                    stored = self._items.get(item_id)
                    if stored is None or stored["text"] != text:
                        has = stored and stored["text"]
                        yield Violation("lost", end["t"], f"{response_id}: {item_id} sent {text!r}, {has!r} is stored")
            replies = Counter(item["index"] for item in by_response[response_id])
            if replies and max(replies.values()) > 1:
                yield Violation("doubled", self._end_s, f"{response_id} has a candidate twice")

    def _one_reply(self, item: Entry) -> Iterator[Violation]:
        path, at = [], item
        while at["parent_id"] is not None:
            if at["parent_id"] not in self._items:
                yield Violation("lost", self._end_s, f"{at['id']} follows {at['parent_id']}, which is missing")
                return
            at = self._items[at["parent_id"]]
            if at["role"] == "user":
                path.append(tag_of(at["text"]) or ("", 0))
        if not path:
            yield Violation("foreign", self._end_s, f"{item['id']} answers nothing")
            return
        fault = fault_in(item["text"], [tag for tag, _ in reversed(path)], path[0][1])
        if fault is not None:
            yield Violation("foreign", self._end_s, f"{item['id']} answers {user_message(*path[0])!r}: {fault}")


def is_ended_well(end: Entry) -> bool:
    """Return whether the final response contains the whole text, or all of it that is stored."""
    return end["status"] in ("completed", "incomplete", "cancelled") and bool(end["texts"])
