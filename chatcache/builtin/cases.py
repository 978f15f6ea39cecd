"""Hold the held-out questions: what is asked, and which answers count as right."""

import dataclasses
from collections.abc import Callable
from random import Random

from chatcache.builtin import arithmetic, language, markup, personas, stories, unknown
from chatcache.builtin.dialogues import LIGHT, Dialogue, compose, short_dialogue
from chatcache.builtin.dialogues import draw as draw_turns
from chatcache.builtin.memory import FACTS, Memory
from chatcache.builtin.personas import Persona
from chatcache.builtin.text import Turn, article, ask, invent, say
from chatcache.builtin.words import HEROES


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Hold a conversation that ends with a user's question, and what accepts its answer."""

    messages: Dialogue
    accepts: Callable[[str], bool]


def _nobody() -> Persona:
    return Persona("none", "", lambda turn: turn.answer, Memory())


def _question(turns: list[Turn], accepts: Callable[[str], bool], who: Persona | None = None) -> Case:
    return Case(compose(who or _nobody(), turns)[:-1], accepts)


def _between(rng: Random, low: int, high: int) -> list[Turn]:
    turns: list[Turn] = []
    wanted = rng.randint(low, high)
    while len(turns) < wanted:
        turns += draw_turns(rng, LIGHT)
    return turns[:wanted]


def _told_name(rng: Random) -> tuple[str, Turn, Turn]:
    name = invent(rng, "name", held=True)
    fact = FACTS["name"]
    return name, Turn(ask(rng, fact.tell, v=name), say(rng, fact.acknowledge, v=name)), Turn(ask(rng, fact.ask), "")


def recall(rng: Random) -> Case:
    """Ask for a name told three to six turns before."""
    name, told, question = _told_name(rng)
    return _question(
        [*_between(rng, 0, 1), told, *_between(rng, 2, 5), question], lambda text: text == f"Your name is {name}."
    )


def recall_long(rng: Random) -> Case:
    """Ask for a name told behind a system prompt of about a thousand tokens and before ten other turns."""
    name, told, question = _told_name(rng)
    who = dataclasses.replace(_nobody(), system=personas.handbook(rng, 45))
    return _question([told, *_between(rng, 8, 12), question], lambda text: text == f"Your name is {name}.", who)


def recall_system(rng: Random) -> Case:
    """Ask for a name that only the system prompt tells."""
    name = invent(rng, "name", held=True)
    who = dataclasses.replace(
        _nobody(), system=f"You are a helpful assistant. {say(rng, FACTS['name'].as_system, v=name)}"
    )
    return _question(
        [*_between(rng, 0, 2), Turn(ask(rng, FACTS["name"].ask), "")], lambda text: text == f"Your name is {name}.", who
    )


def two_digit_sum(rng: Random) -> Case:
    """Ask for a sum of two unseen two-digit numbers."""
    a, b = arithmetic.sum_pair(rng, held=True)
    return _question(
        [Turn(ask(rng, arithmetic.SUM_QUESTIONS, a=a, b=b), "")], lambda text: text == f"{a} + {b} = {a + b}."
    )


def one_digit_sum(rng: Random) -> Case:
    """Ask for a sum that everybody tries first. Not held out: there are only a hundred."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return _question(
        [Turn(ask(rng, arithmetic.SUM_QUESTIONS, a=a, b=b), "")], lambda text: text == f"{a} + {b} = {a + b}."
    )


def spelling(rng: Random) -> Case:
    """Ask for the letters of an unseen word."""
    word = language.word_to_spell(rng, held=True).lower()
    return _question(
        [Turn(ask(rng, language.SPELL_QUESTIONS, w=word), "")], lambda text: language.spelled(word) in text
    )


def _exact(make: Callable[[Random], Turn]) -> Callable[[Random], Case]:
    def case(rng: Random) -> Case:
        turn = make(rng)
        return _question([turn], lambda text: text == turn.answer)

    return case


def difference(rng: Random) -> Case:
    """Ask for a difference of two unseen two-digit numbers."""
    a, b = arithmetic.difference_pair(rng, held=True)
    return _question(
        [Turn(ask(rng, arithmetic.DIFFERENCE_QUESTIONS, a=a, b=b), "")], lambda text: text == f"{a} - {b} = {a - b}."
    )


def not_knowing(rng: Random) -> Case:
    """Ask what the model cannot know."""
    return _question(
        [unknown.unknown(rng)], lambda text: any(word in text for word in ("know", "beyond me", "understand"))
    )


def ends(rng: Random) -> Case:
    """Ask anything, at any point of a dialogue: the answer only has to end."""
    dialogue = short_dialogue(rng)
    users = [at for at, message in enumerate(dialogue) if message["role"] == "user"]
    return Case(dialogue[: rng.choice(users) + 1], lambda text: bool(text.strip()))


def story_topic(rng: Random) -> Case:
    """Ask for a story about something: it has to appear, in at least four sentences."""
    hero = rng.choice(HEROES)
    return _question(
        [Turn(ask(rng, stories.STORY_TOPIC_QUESTIONS, t=article(hero)), "")],
        lambda text: hero in text and text.count(".") >= 4,
    )


def code(rng: Random) -> Case:
    """Ask for a program that prints a word: it has to run."""
    word = invent(rng, "code", held=True).lower()

    def accepts(text: str) -> bool:
        return text.startswith("```python\n") and text.endswith("\n```") and f'print("{word}")' in text

    return _question(
        [Turn(ask(rng, "write python code that prints {w}|python code to print {w}", w=word), "")], accepts
    )


def a_table(rng: Random) -> Case:
    """Ask for a table: every row has to have two cells."""
    turn = markup.table(rng)
    return _question(
        [turn], lambda text: len(lines := text.split("\n")) > 3 and all(line.count("|") == 3 for line in lines)
    )


def _obeys(name: str) -> Callable[[Random], Case]:
    def case(rng: Random) -> Case:
        who = personas.persona(rng, name=name)
        marker = who.style(Turn("", "\0")).replace("\0", "").strip()
        checks: dict[str, Callable[[str], bool]] = {
            "shout": lambda text: text == text.upper(),
            "whisper": lambda text: text == text.lower(),
            "brief": lambda text: len(text) < 120,
            "pirate": lambda text: text.startswith("Arr!"),
            "polite": lambda text: text.startswith("With pleasure.") and text.endswith("for you?"),
            "ending": lambda text: text.endswith(marker),
            "beginning": lambda text: text.startswith(marker),
        }
        return _question([*_between(rng, 0, 2), *_between(rng, 1, 1)], checks[name], who)

    return case


FIGURES: tuple[tuple[str, Callable[[Random], Case], float], ...] = (
    ("name recall over several turns", recall, 0.0),
    ("name recall over several turns", recall, 0.8),
    ("name recall, 1,000-token system prompt", recall_long, 0.0),
    ("name recall from the system prompt", recall_system, 0.0),
    ("two-digit sums", two_digit_sum, 0.0),
    ("two-digit sums", two_digit_sum, 0.8),
    ("one-digit sums (not held out)", one_digit_sum, 0.0),
    ("two-digit differences", difference, 0.0),
    ("ends its turn", ends, 0.0),
    ("ends its turn", ends, 0.8),
    ("spelling of unseen words", spelling, 0.0),
    ("counting", _exact(arithmetic.count), 0.0),
    ("days, months, letters", _exact(language.calendar), 0.0),
    ("opposites", _exact(language.opposite), 0.0),
    ("capital letters, repeating", _exact(lambda rng: rng.choice((language.letters, language.repeat))(rng)), 0.0),
    ("story about the topic asked for", story_topic, 0.8),
    ("Python program that prints a word", code, 0.0),
    ("Markdown table", a_table, 0.8),
    ("says that it does not know", not_knowing, 0.0),
    *((f"obeys: {name}", _obeys(name), 0.0) for name in (*personas.STYLES, "ending", "beginning")),
)  # fmt: skip
