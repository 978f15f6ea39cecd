"""Test the history checker: a correct history passes, and each kind of violation is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.checker import Checker
from tests.chaos.history import Entry, History, entries_of
from tests.chaos.tagged_text import DRAWN, choices_at, fault_in, length_of, user_message

TAGS, WORDS = ["c1t1", "c1t2"], 3


def speak(tags: list[str], num_words: int, letter: int = 0) -> str:
    choices = [choices_at(tags, num_words, position) for position in range(length_of(tags[-1], num_words))]
    return "".join(choice if len(choice) == 1 else choice[letter] for choice in choices)


def turn(tags: list[str], t: float, parent: str | None) -> tuple[list[Entry], list[Entry]]:
    """Return the observations and the stored items of one turn with two candidates, read by one stream."""
    op = key = tags[-1]
    response, user = f"resp_{op}", f"msg_{op}"
    texts = [speak(tags, WORDS, letter) for letter in (0, 1)]
    frames: list[tuple[str, int | None, str | None]] = [("response.created", None, None)]
    for start in range(0, len(texts[0]), 4):
        frames += [("response.output_text.delta", index, texts[index][start : start + 4]) for index in (0, 1)]
    frames += [("response.output_text.done", index, texts[index]) for index in (0, 1)]
    frames += [("response.completed", None, None)]
    seen: list[Entry] = [
        {"kind": "invoke", "op": op, "key": key, "tags": tags, "words": WORDS, "n": 2, "transport": "sse"},
        {"kind": "ack", "op": op, "response": response, "conversation": "conv"},
        {"kind": "open", "op": op, "stream": f"s-{op}", "response": response, "after": -1},
        *(
            {"kind": "frame", "stream": f"s-{op}", "seq": seq, "type": kind, "index": index, "text": text}
            for seq, (kind, index, text) in enumerate(frames)
        ),
        {"kind": "close", "stream": f"s-{op}", "how": "end"},
        {
            "kind": "ended", "op": op, "response": response, "status": "completed", "saved": True,
            "texts": {f"{user}_{index}": text for index, text in enumerate(texts)},
        },
    ]  # fmt: skip
    items: list[Entry] = [
        {
            "id": user,
            "parent_id": parent,
            "role": "user",
            "text": user_message(op, WORDS),
            "response_id": response,
            "index": 0,
        }
    ]
    for index, text in enumerate(texts):
        items.append(
            {"id": f"{user}_{index}", "parent_id": user, "role": "assistant", "text": text, "response_id": response}
            | {"index": index, "finish_reason": "stop"}
        )
    return [{"t": t + offset / 1000, **entry} for offset, entry in enumerate(seen)], items


def good() -> list[Entry]:
    first, its_items = turn(TAGS[:1], 1.0, None)
    second, more_items = turn(TAGS, 2.0, "msg_c1t1_0")
    stored = {"t": 9.0, "kind": "stored", "conversation": "conv", "items": its_items + more_items}
    return [*first, *second, stored, {"t": 9.1, "kind": "ledger", "gateway": 0, "problems": []}]


def rules(entries: list[Entry]) -> set[str]:
    return {violation.rule for violation in Checker(entries).violations()}


def test_correct_history_has_no_violations() -> None:
    assert Checker(good()).violations() == []


def frames_of(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry["kind"] == "frame"]


def items_of(entries: list[Entry]) -> list[Entry]:
    items: list[Entry] = next(entry for entry in entries if entry["kind"] == "stored")["items"]
    return items


def of_kind(entries: list[Entry], kind: str) -> Entry:
    return next(entry for entry in entries if entry["kind"] == kind)


def lose_an_acknowledged_turn(entries: list[Entry]) -> None:
    items_of(entries)[:] = items_of(entries)[:3]


def lose_a_reply(entries: list[Entry]) -> None:
    items_of(entries).pop()


def store_a_turn_twice(entries: list[Entry]) -> None:
    items_of(entries).append({**items_of(entries)[3], "id": "msg_again"})


def answer_a_key_twice(entries: list[Entry]) -> None:
    entries.append({**of_kind(entries, "ack"), "t": 5.0, "response": "resp_other"})


def double_a_token(entries: list[Entry]) -> None:
    frame = frames_of(entries)[5]
    frame["text"] += frame["text"][-1]


def lose_a_token(entries: list[Entry]) -> None:
    frames_of(entries)[5]["text"] = frames_of(entries)[5]["text"][:-1]


def lose_a_frame(entries: list[Entry]) -> None:
    entries.remove(frames_of(entries)[5])


def send_a_frame_again(entries: list[Entry]) -> None:
    frame = frames_of(entries)[5]
    entries.insert(entries.index(frame), copy.copy(frame))


def reply_with_another_text(entries: list[Entry]) -> None:
    """Replace every text by one of another conversation, consistently."""
    text = speak(["c7t1"], WORDS)
    frames = [frame for frame in frames_of(entries) if frame["stream"] == "s-c1t1" and frame["index"] == 0]
    for frame, start in zip(frames, range(0, len(text), 4), strict=False):
        frame["text"] = text if frame["type"].endswith("done") else text[start : start + 4]
    of_kind(entries, "ended")["texts"]["msg_c1t1_0"] = text
    items_of(entries)[1]["text"] = text


def forget_the_first_turn(entries: list[Entry]) -> None:
    """The prompt of the second turn lacks the first turn; only the stored reply shows it."""
    items_of(entries)[4]["text"] = items_of(entries)[5]["text"] = speak(["c1t2"], WORDS)


def store_another_text(entries: list[Entry]) -> None:
    text: str = items_of(entries)[4]["text"]
    offset = text.index(".00") + 3
    items_of(entries)[4]["text"] = text[:offset] + DRAWN.replace(text[offset], "")[0] + text[offset + 1 :]


def end_without_a_terminal_frame(entries: list[Entry]) -> None:
    entries.remove(frames_of(entries)[-1])


def send_after_the_end(entries: list[Entry]) -> None:
    last = frames_of(entries)[-1]
    entries.append({**last, "t": 2.9, "seq": last["seq"] + 1})


def send_readers_different_frames(entries: list[Entry]) -> None:
    frame = frames_of(entries)[5]
    entries.append({**of_kind(entries, "open"), "t": 3.0, "stream": "late", "after": frame["seq"] - 1})
    entries.append({**frame, "t": 3.1, "stream": "late", "text": "else"})


def fail_without_a_cause(entries: list[Entry]) -> None:
    of_kind(entries, "ended").update(status="failed", texts={})


def refuse_a_valid_request(entries: list[Entry]) -> None:
    entries.append({"t": 3.0, "kind": "refused", "op": "c1t1", "status": 500, "code": "internal_error"})


def revive_a_deleted_turn(entries: list[Entry]) -> None:
    entries.append({"t": 3.0, "kind": "delete", "op": "c1t2", "conversation": "conv", "done": True})


def complete_half_of_the_text(entries: list[Entry]) -> None:
    texts = of_kind(entries, "ended")["texts"]
    texts["msg_c1t1_0"] = texts["msg_c1t1_0"][:9]


def keep_pages(entries: list[Entry]) -> None:
    entries[-1]["problems"] = ["3 pages in use"]


INJECTED: dict[Callable[[list[Entry]], None], str] = {
    lose_an_acknowledged_turn: "lost",
    lose_a_reply: "lost",
    store_a_turn_twice: "doubled",
    answer_a_key_twice: "doubled",
    double_a_token: "foreign",
    lose_a_token: "foreign",
    lose_a_frame: "gap",
    send_a_frame_again: "repeat",
    reply_with_another_text: "foreign",
    forget_the_first_turn: "foreign",
    store_another_text: "lost",
    end_without_a_terminal_frame: "terminal",
    send_after_the_end: "terminal",
    send_readers_different_frames: "frames",
    fail_without_a_cause: "failed",
    refuse_a_valid_request: "refused",
    revive_a_deleted_turn: "revived",
    complete_half_of_the_text: "text",
    keep_pages: "ledger",
}


@pytest.mark.parametrize("inject", INJECTED, ids=lambda inject: inject.__name__)
def test_injected_violation_is_found_by_its_rule(inject: Callable[[list[Entry]], None]) -> None:
    entries = good()
    inject(entries)
    assert INJECTED[inject] in rules(entries)


def test_deleted_turns_are_no_violation() -> None:
    entries = good()
    fail_without_a_cause(entries)
    items_of(entries)[:] = [item for item in items_of(entries) if item["id"] not in ("msg_c1t1_0", "msg_c1t1_1")]
    items_of(entries)[:] = items_of(entries)[:1]
    entries.append({"t": 0.5, "kind": "delete", "op": "c1t1", "conversation": "", "done": True})
    entries.append({"t": 3.0, "kind": "delete", "op": "c1t2", "conversation": "conv", "done": True})
    for frame in [frame for frame in frames_of(entries) if frame["stream"] == "s-c1t1"][1:]:
        entries.remove(frame)
    of_kind(entries, "close")["how"] = "lost"
    assert Checker(entries).violations() == []


def test_failed_response_after_an_engine_crash_is_a_violation() -> None:
    entries = good()
    fail_without_a_cause(entries)
    entries.append({"t": 0.5, "kind": "fault", "step": 0, "name": "kill_engine", "phase": "begin", "target": 0})
    assert "failed" in rules(entries)


def test_history_read_from_the_file_equals_the_recorded_one(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.note("ack", op="c1t1", response="resp", conversation="conv")
    history.close()
    (entry,) = entries_of(tmp_path / "history.jsonl")
    assert entry.pop("t") >= 0 and entry == {"kind": "ack", "op": "c1t1", "response": "resp", "conversation": "conv"}


def test_each_missing_repeated_or_changed_character_is_found() -> None:
    text = speak(TAGS, WORDS)
    assert fault_in(text, TAGS, WORDS) is None
    for offset in range(len(text) - 1):
        assert fault_in(text[:offset] + text[offset + 1 :], TAGS, WORDS), offset  # one lost
        assert fault_in(text[: offset + 1] + text[offset:], TAGS, WORDS) or text[offset] == text[offset + 1], offset
    assert fault_in(text + " ", TAGS, WORDS)
