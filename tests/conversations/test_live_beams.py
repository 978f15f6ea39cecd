"""Live beams as text, against decoding every path from the root."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.replies.events import BeamNode, BeamReader, ReplyBeams, merge_beams
from chatcache.types.events import Beams, LiveBeam
from tests.gateway.serving import tiny_tokenizer

BYTES = {piece[0]: token for token, piece in enumerate(tiny_tokenizer().token_bytes) if len(piece) == 1}


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="aé你🎉", min_size=1, max_size=6), st.data())
def test_a_character_cut_into_tokens_comes_whole(text: str, data: st.DataObject) -> None:
    """Every byte a token of its own, beside beams that go other ways: the path still spells the text."""
    reader = BeamReader(tiny_tokenizer().token_bytes)
    spelled, node, number = "", 0, 0
    for step, byte in enumerate(text.encode()):
        others = [LiveBeam(number + 2 + at, node, BYTES[0x41 + at], -1.0) for at in range(data.draw(st.integers(0, 2)))]
        mine = LiveBeam(number + 1, node, BYTES[byte], -0.5)
        got = reader.read(Beams("r", step + 1, (mine, *others)))
        assert got.live == tuple(beam.node for beam in (mine, *others))
        assert [each.parent for each in got.nodes] == [node] * (1 + len(others))
        spelled += got.nodes[0].text
        assert text.startswith(spelled)
        node, number = mine.node, number + 1 + len(others)
    assert spelled == text


def test_joined_reports_keep_every_node_and_the_last_word() -> None:
    first, then = (BeamNode(number, number - 1, "x", -1.0) for number in (1, 2))
    one = merge_beams(ReplyBeams((first,), (1,)), ReplyBeams((then,), (2,)))
    assert one == ReplyBeams((first, then), (2,))
