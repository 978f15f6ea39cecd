# ruff: noqa: SIM905  (word lists read better as text)
"""Generate system prompts, and restyle plain answers the way each of them demands."""

import dataclasses
import re
from collections.abc import Callable
from random import Random

from chatcache.builtin.memory import FACTS, Memory, value_of
from chatcache.builtin.text import Turn, ask, first_sentence, invent, say
from chatcache.builtin.words import HEROES, JOBS, NAMES, PLACES, TRAITS, TREASURES

Style = Callable[[Turn], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Persona:
    """Hold a system prompt, how it changes answers, and what it already tells about the user."""

    name: str
    system: str
    style: Style
    memory: Memory
    assistant_name: str = ""


def _plain(turn: Turn) -> str:
    return turn.answer


def _shout(turn: Turn) -> str:
    return turn.answer if turn.answer.startswith("```") else turn.answer.upper()


def _whisper(turn: Turn) -> str:
    return turn.answer if turn.plain else turn.answer.lower()


def _brief(turn: Turn) -> str:
    return turn.brief or (turn.answer if turn.plain else first_sentence(turn.answer))


PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "hello": "ahoy",
    "hi": "ahoy",
}


def _pirate(turn: Turn) -> str:
    if turn.plain:
        return f"Arr! Here ye go:\n{turn.answer}"

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        other = PIRATE_WORDS[word.lower()]
        return other.capitalize() if word[0].isupper() else other

    return "Arr! " + re.sub(rf"\b({'|'.join(PIRATE_WORDS)})\b", swap, turn.answer, flags=re.IGNORECASE)


def _polite(turn: Turn) -> str:
    answer = f"\n{turn.answer}\n" if turn.plain else f" {turn.answer} "
    return f"With pleasure.{answer}Is there anything else I may do for you?"


STYLES: dict[str, tuple[str, Style]] = {
    "shout": ("Always answer in capital letters.|SHOUT ALL YOUR ANSWERS.|Write everything in capitals.|"
            "You shout: use only capital letters.|"
              "Answer in uppercase.|Respond in ALL CAPS.|You must always shout in capitals.|"
            "Reply in capital letters only.", _shout),
    "whisper": ("Answer in small letters only.|Use only lowercase letters.|"
            "Write everything in lowercase.|Never use capital letters.", _whisper),
    "brief": ("Be brief.|Answer briefly.|Keep your answers short.|Be concise.|"
            "Answer in as few words as possible.|You are terse.|"
              "Give very short answers.|Answer with one short sentence.|Use as few words as you can.|"
            "Be very brief.", _brief),
    "pirate": ("Answer as a pirate.|You are a pirate.|Talk like a pirate.|Speak like a pirate.|"
            "You are a pirate captain. Stay in character.|"
               "Respond like a pirate would.|Pretend to be a pirate.", _pirate),
    "polite": ("Be very polite.|You are a polite butler.|Answer politely.|"
            "You are extremely polite and formal.|Always be courteous.|"
               "Be polite.|You are a courteous assistant.", _polite),
}  # fmt: skip
ENDING = (
    'End each answer with the word {w}.|End every answer with "{w}".|'
    "Always finish your answer with {w}.|Finish every reply with the word {w}.|"
    "Your last word is always {w}.|After each answer, say {w}.|Close every answer with the word {w}."
)
BEGINNING = (
    'Begin each answer with the word {w}.|Start every answer with "{w}".|'
    "Always begin your reply with {w}.|Your first word is always {w}.|"
    "Start all of your answers with {w}."
)
NEUTRAL = (
    "You are a helpful assistant.|You are a helpful assistant.|You are a friendly assistant.|"
    "You are an AI assistant.|You are chatcache.|"
    "You are a helpful, honest and harmless assistant.|Help the user.|"
    "You are a useful demo assistant.|Answer the user's questions.|"
    "You are a chatbot.|You are a knowledgeable assistant. Answer truthfully.|"
    "You are a small demonstration model.|Chat with the user."
)
NAMED = (
    "You are {n}, a helpful assistant.|Your name is {n}.|You are called {n}.|"
    "You are an assistant called {n}.|Act as {n}.|"
    "You are {n}.|Your name is {n}. Be helpful.|You are {n}, a friendly chatbot."
)
END_WORDS = (
    "banana indeed over amen cheers friend sir captain meow ciao done peace roger okay truly thanks stop nice".split()
)

HANDBOOK = (
    "Visitors may enter {place} between {a} and {b} o'clock.|"
    "The {job} keeps {treasure} in room {a}.|Nobody may feed the {hero}.|"
    "Every {trait} {hero} receives {a} points and one cup of tea.|In case of fire, walk to "
    "{place} and wait for the {job}.|"
    "Reports are written on page {a} and signed by {name}.|"
    "The office of {name} is on floor {a}.|A {trait} tone is welcome.|"
    "Orders above {b} pieces are checked by the {job}.|Lost things, such as {treasure}, are kept for {a} days.|"
    "On Mondays {name} waters the plants in {place}.|"
    "Rule {a}: do not promise what you cannot keep.|The {hero} sleeps until {a}.|"
    "If somebody asks about {treasure}, send them to {name}.|"
    "The archive of {place} holds {b} boxes.|Answer honestly and calmly.|"
    "The {job} and the {hero} meet in {place} once a year.|Keep the door closed after {b} "
    "o'clock.|Section {a} was removed last year."
)


def handbook(rng: Random, num_sentences: int) -> str:
    """Return rules and facts of an imaginary company: plain text to fill a long prompt."""
    return " ".join(
        say(
            rng,
            HANDBOOK,
            place=rng.choice(PLACES),
            job=rng.choice(JOBS),
            treasure=rng.choice(TREASURES),
            hero=rng.choice(HEROES),
            trait=rng.choice(TRAITS),
            name=rng.choice(NAMES) if rng.random() < 0.5 else invent(rng, "name"),
            a=rng.randint(1, 24),
            b=rng.randint(20, 99),
        )
        for _ in range(num_sentences)
    )


def _marker(rng: Random) -> str:
    word = rng.choice(END_WORDS) if rng.random() < 0.6 else invent(rng, "marker")
    return rng.choice((word, word.capitalize(), word.capitalize(), word.upper() if len(word) < 7 else word))


def _affix(name: str, word: str) -> Style:
    def ending(turn: Turn) -> str:
        return f"{turn.answer}\n{word}." if turn.plain else f"{turn.answer} {word}."

    def beginning(turn: Turn) -> str:
        return f"{word}!\n{turn.answer}" if turn.plain else f"{word}! {turn.answer}"

    return ending if name == "ending" else beginning


def _rule(rng: Random, name: str) -> tuple[str, Style]:
    if name in STYLES:
        templates, style = STYLES[name]
        return rng.choice(templates.split("|")), style
    word = _marker(rng)
    return say(rng, ENDING if name == "ending" else BEGINNING, w=word), _affix(name, word)


CHANGES = {
    "shout": "from now on write in capital letters|please shout from now on|"
    "answer in capitals from now on|shout please",
    "whisper": "from now on use small letters only|please write in lowercase from now on",
    "brief": "please be brief from now on|be brief|keep it short from now on|shorter answers please",
    "pirate": "talk like a pirate|please talk like a pirate from now on|be a pirate|answer as a pirate|"
    "speak like a pirate",
    "polite": "be more polite|please be very polite from now on|be polite",
    "plain": "talk normally again|please write normally|back to normal please|stop that and talk normally",
}
STYLES_AFTER: dict[str, Style] = {name: style for name, (_, style) in STYLES.items()} | {"plain": _plain}


def change_style(rng: Random) -> Turn:
    """Ask the assistant to speak differently from now on."""
    name = rng.choice(tuple(CHANGES))
    return Turn(ask(rng, CHANGES[name]), say(rng, "Good, I will do that.|As you wish."), becomes=name)


def persona(rng: Random, *, num_handbook: int = 0, name: str | None = None) -> Persona:
    """Draw a system prompt; `num_handbook` sentences of plain text may surround its rule."""
    name = name or rng.choice(
        ("none", "none", "neutral", "neutral", "named", "facts", "ending", "ending", "beginning", *STYLES)
    )
    memory, parts, assistant_name = Memory(), list[str](), ""
    style: Style = _plain
    if name == "neutral":
        parts = [rng.choice(NEUTRAL.split("|"))]
    elif name == "named":
        assistant_name = rng.choice(NAMES) if rng.random() < 0.3 else invent(rng, "name")
        parts = [say(rng, NAMED, n=assistant_name)]
    elif name == "facts":
        for kind in rng.sample([kind for kind in FACTS if FACTS[kind].as_system], rng.randint(1, 3)):
            memory.values[kind] = value_of(rng, kind)
            parts.append(say(rng, FACTS[kind].as_system, v=memory.values[kind]))
        parts = [rng.choice(NEUTRAL.split("|"))] * (rng.random() < 0.6) + parts
    elif name != "none":
        rule, style = _rule(rng, name)
        parts = [rng.choice(NEUTRAL.split("|"))] * (rng.random() < 0.35) + [rule]
    if num_handbook:
        first = rng.randint(0, num_handbook)
        parts = [handbook(rng, first), *parts, handbook(rng, num_handbook - first)]
    elif parts and rng.random() < 0.06:
        parts.append(handbook(rng, rng.randint(1, 4)))
    return Persona(name, " ".join(part for part in parts if part), style, memory, assistant_name)
