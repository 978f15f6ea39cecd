"""Checkpoints: every state of a reply is restored from what is new in each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatcache.conversations.checkpoints import CheckpointEncoder, restore
from chatcache.conversations.replies.parser import ReplyContext
from chatcache.conversations.tree import COMPLETED, INCOMPLETE, Item, ReplyParts, ToolCall
from chatcache.tokenizer.reply_format import detect_format
from tests.tokenizer.families import tokenizer_of

pieces = st.text("ab\U0001f389", max_size=6)


def state(index: int, text: str, ids: int, parts: ReplyParts, status: str = INCOMPLETE) -> Item:
    return Item(f"msg_{index}", "msg_u", "assistant", text, tuple(range(ids)), "resp", index, status, "x", 1.0, parts)


@st.composite
def growing(draw: st.DrawFn) -> list[list[Item]]:
    """States of two candidates: settled text grows, held text at the end may change, calls begin.

    Output changes only with new tokens.
    """
    settled = [{"text": "", "reasoning": "", "raw": "", "calls": [], "ids": 0} for _ in range(2)]
    states: list[list[Item]] = []
    for _ in range(draw(st.integers(1, 8))):
        items: list[Item] = []
        for index, each in enumerate(settled):
            num_new = draw(st.integers(0, 3))
            if not num_new:
                items += [item for item in (states[-1] if states else []) if item.index == index]
                continue
            each["ids"] += num_new  # type: ignore[operator]
            for part in ("text", "reasoning", "raw"):
                each[part] += draw(pieces)  # type: ignore[operator]
            calls: list[list[str]] = each["calls"]  # type: ignore[assignment]
            if draw(st.integers(0, 3)) == 0:
                calls.append([f"call_{len(calls)}", "look", ""])
            if calls:
                calls[-1][2] += draw(pieces)
            held = draw(pieces)
            raw = str(each["raw"]) + held if draw(st.booleans()) or calls else ""
            whole = tuple(ToolCall(*call) for call in calls)
            parts = ReplyParts(str(each["reasoning"]), whole, raw, is_call_cut=bool(calls), output_indexes=(2, 0))
            if draw(st.integers(0, 5)):
                items.append(state(index, str(each["text"]) + held, int(str(each["ids"])), parts))
        states.append(items)
    return states


@given(growing(), st.data())
def test_restored_state_is_the_last_one(states: list[list[Item]], data: st.DataObject) -> None:
    """Also where a write failed, or was stored although it was reported as failed."""
    encoder, stored = CheckpointEncoder(), list[bytes]()
    wanted: dict[int, Item] = {}
    for items in states:
        encoded = encoder.encode(items)
        if encoded is None:
            continue
        fate = data.draw(st.sampled_from(["stored", "stored, not confirmed", "lost"]))
        if fate != "lost":
            stored.append(encoded)
            wanted |= {item.index: item for item in items if item.token_ids or item.text or item.index in wanted}
        if fate == "stored":
            encoder.confirm()
    assert restore(stored) == [wanted[index] for index in sorted(wanted)]


def test_checkpoints_are_about_as_long_as_the_reply() -> None:
    encoder, stored = CheckpointEncoder(), list[bytes]()
    text = "word " * 20_000
    for at in range(100, len(text) + 1, 100):
        encoded = encoder.encode([state(0, text[:at], at // 5, ReplyParts())])
        assert encoded is not None
        stored.append(encoded)
        encoder.confirm()
        assert encoder.encode([state(0, text[:at], at // 5, ReplyParts())]) is None, "nothing has changed"
    assert max(map(len, stored)) < 500
    assert restore(stored) == [state(0, text, len(text) // 5, ReplyParts())]


def test_end_of_a_candidate_is_a_change() -> None:
    encoder = CheckpointEncoder()
    first = encoder.encode([state(0, "a", 1, ReplyParts())])
    encoder.confirm()
    ended = state(0, "a", 1, ReplyParts(), COMPLETED)
    last = encoder.encode([ended])
    assert first is not None and last is not None and restore([first, last]) == [ended]


class Uncopied(dict[str, object]):
    """A schema that must not be copied, because it may be large."""

    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError("a schema was copied")


def test_copied_parser_shares_schemas_and_nothing_else() -> None:
    tokenizer = tokenizer_of("hermes")
    context = ReplyContext(tokenizer, detect_format(tokenizer), {"look": Uncopied()})
    parser = context.new_parser(())
    parser.push('Hm. <tool_call>\n{"name": "look", "arguments": {"at": "the')
    clone = parser.copy(context.immutables)
    clone.push(' house"}}\n</tool_call>')
    parser.push(' garden"}}\n</tool_call>')
    assert [each.calls[0].arguments for each in (parser, clone)] == ['{"at": "the garden"}', '{"at": "the house"}']
    assert parser.calls[0].call_id == clone.calls[0].call_id
