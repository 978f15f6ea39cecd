"""The generator: one seed, one stream; held-out values never appear."""

import itertools
import re
from random import Random

from chatcache.demo_model.training import skills
from chatcache.demo_model.training.corpus import Dialogue, long_dialogue, short_dialogue, stream
from chatcache.demo_model.training.evaluate import FIGURES
from chatcache.demo_model.training.personas import STYLES
from chatcache.demo_model.training.wording import Turn, held_out, invent


def sample(seed: int, count: int, long_share: float = 0.0) -> list[Dialogue]:
    return list(itertools.islice(stream(seed, long_share=long_share), count))


def test_same_seed_gives_the_same_dialogues_and_another_seed_others() -> None:
    assert sample(3, 200, 0.1) == sample(3, 200, 0.1)
    assert sample(3, 200) != sample(4, 200)


def test_dialogues_alternate_and_end_with_the_assistant() -> None:
    for dialogue in sample(5, 500, 0.05):
        roles = [message["role"] for message in dialogue]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
        assert all(message["content"] for message in dialogue)


def test_every_sum_in_the_training_dialogues_is_right_and_not_held_out() -> None:
    seen = 0
    for dialogue in sample(6, 2000):
        for message in dialogue:
            if message["role"] == "assistant":
                for a, b, total in re.findall(r"\b(\d+) \+ (\d+) = (\d+)", message["content"]):
                    assert int(a) + int(b) == int(total)
                    pair = (min(int(a), int(b)), max(int(a), int(b)))
                    assert pair[0] < 10 or not held_out("sum", pair)
                    seen += 1
    assert seen > 500


def test_every_one_digit_sum_is_practised() -> None:
    rng = Random(1)
    drawn = {skills.sum_pair(rng) for _ in range(20_000)}
    assert {(a, b) for a in range(10) for b in range(10)} <= drawn


def test_no_held_out_name_is_recalled_in_the_training_dialogues() -> None:
    seen = 0
    for dialogue in sample(7, 3000):
        answers = [message["content"] for message in dialogue if message["role"] == "assistant"]
        for name in re.findall(r"^Your name is (\S+)\.$", "\n".join(answers), flags=re.MULTILINE):
            assert not held_out("name", name)
            seen += 1
    assert seen > 200


def test_about_a_tenth_of_the_values_is_held_out() -> None:
    rng = Random(0)
    names = {invent(rng, "name") for _ in range(2000)}
    assert not any(held_out("name", name) for name in names)
    assert all(held_out("name", invent(rng, "name", held=True)) for _ in range(50))
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    assert 0.08 < sum(held_out("sum", pair) for pair in pairs) / len(pairs) < 0.12
    assert all(held_out("sum", tuple(sorted(skills.sum_pair(rng, held=True)))) for _ in range(50))


def test_styles_do_what_their_system_prompts_say() -> None:
    turn = Turn("Who am I?", "Your name is Ada. How are you?")
    styled = {name: style(turn) for name, (_, style) in STYLES.items()}
    assert styled == {
        "shout": "YOUR NAME IS ADA. HOW ARE YOU?",
        "whisper": "your name is ada. how are you?",
        "brief": "Your name is Ada.",
        "pirate": "Arr! Yer name be Ada. How be ye?",
        "polite": "With pleasure. Your name is Ada. How are you? Is there anything else I may do for you?",
    }


def test_the_reference_answer_of_a_case_is_never_part_of_its_prompt() -> None:
    rng = Random(1)
    for _, make, _ in FIGURES:
        for _ in range(20):
            assert make(rng).messages[-1]["role"] in ("user", "tool")


def test_long_dialogues_are_much_longer_than_short_ones() -> None:
    rng = Random(2)
    short = [sum(len(message["content"]) for message in short_dialogue(rng)) for _ in range(100)]
    long = [sum(len(message["content"]) for message in long_dialogue(rng)) for _ in range(100)]
    assert sum(long) > 5 * sum(short)
