# ruff: noqa: SIM905  (word lists read better as text)
"""Generate system prompts with answers in their style, and facts that users recall later."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from random import Random

from chatcache.demo_model.training.skills import name_of
from chatcache.demo_model.training.wording import (
    CITIES,
    COLORS,
    FOODS,
    HEROES,
    HOBBIES,
    JOBS,
    NAMES,
    PETS,
    PLACES,
    TRAITS,
    TREASURES,
    Turn,
    article,
    ask,
    first_sentence,
    invent,
    pick,
    say,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Wording of one kind of fact, from its statement to its recall (`{v}` is its value)."""

    state: str
    acknowledge: str
    ask: str
    recall: str
    missing: str
    as_system: str


FACTS: dict[str, Fact] = {
    "name": Fact(
        "my name is {v}|i am {v}|call me {v}|i'm {v}|hi, i am {v}|hello, my name is {v}|"
        "hello! my name is {v}|you can call me {v}|"
        "the name is {v}|please call me {v}|hi, my name is {v}|people call me {v}|hey, {v} here|"
        "remember my name: {v}|name: {v}",
        "Nice to meet you, {v}!|Hello, {v}! What can I do for you?|Hi {v}! How can I help you?|"
        "Pleased to meet you, {v}.",
        "what is my name?|do you remember my name?|who am i?|what am i called?|do you know my name?|tell me my name|"
        "say my name|can you tell me my name?|what was my name?|what was my name again?|my name?|remember my name?|"
        "do you still know my name?|what did i say my name was?|how am i called?",
        "Your name is {v}.",
        "You have not told me your name yet.",
        "The user's name is {v}.|The user is called {v}.|You are talking to {v}.",
    ),
    "number": Fact(
        "my lucky number is {v}|my favourite number is {v}|my number is {v}|"
        "remember the number {v}|my favorite number is {v}",
        "I will remember the number {v}.|Good, your number is {v}.|{v}: noted.",
        "what is my lucky number?|what was my number?|which number did i tell you?|"
        "what is my number?|what number did i say?|"
        "what is my favourite number?|do you remember the number?|what is my favorite number?|what was the number?",
        "Your number is {v}.",
        "You have not told me a number yet.",
        "The user's number is {v}.",
    ),
    "color": Fact(
        "my favourite colour is {v}|my favorite color is {v}|i like {v} best of all colours|"
        "i love the colour {v}|the color i like most is {v}",
        "{v} is a fine colour.|I will remember that you like {v}.|A good choice: {v}.",
        "what is my favourite colour?|what is my favorite color?|which colour do i like?|what colour do i like?|"
        "do you remember my favourite colour?|which color is my favorite?",
        "Your favourite colour is {v}.",
        "You have not told me your favourite colour yet.",
        "The user's favourite colour is {v}.",
    ),
    "pet": Fact(
        "i have {v}|my pet is {v}|i own {v}|at home i have {v}|my pet: {v}",
        "How nice: {v}!|I will remember {v}.|{v}, how lovely!",
        "what pet do i have?|which pet do i have?|what is my pet?|what is my pet called?|what is the name of my pet?|"
        "do you remember my pet?|who is my pet?",
        "You have {v}.",
        "You have not told me about a pet yet.",
        "The user has {v}.",
    ),
    "city": Fact(
        "i live in {v}|i am from {v}|i come from {v}|my home is {v}|my city is {v}|i was born in {v}",
        "{v} must be a nice place.|I will remember that you are from {v}.|Greetings to {v}!",
        "where do i live?|where am i from?|which city do i live in?|what is my city?|"
        "where do i come from?|do you remember where i live?",
        "You are from {v}.",
        "You have not told me where you live yet.",
        "The user lives in {v}.|The user is from {v}.",
    ),
    "food": Fact(
        "my favourite food is {v}|i like {v}|i love {v}|my favorite food is {v}|i like to eat {v}",
        "{v} sounds tasty.|I will remember that you like {v}.|Enjoy your {v}!",
        "what is my favourite food?|what do i like to eat?|which food do i like?|"
        "what is my favorite food?|what food do i like?",
        "You like {v}.",
        "You have not told me what you like to eat yet.",
        "The user likes {v}.",
    ),
    "job": Fact(
        "i work as {v}|my job is {v}|i am {v} by trade|by profession i am {v}",
        "An important job: {v}.|I will remember that you are {v}.",
        "what is my job?|what do i do for a living?|what do i work as?|do you remember my job?|what is my profession?",
        "You are {v}.",
        "You have not told me your job yet.",
        "The user is {v}.",
    ),
    "hobby": Fact(
        "my hobby is {v}|in my free time i like {v}|i enjoy {v}",
        "{v} is a good hobby.|I will remember that you enjoy {v}.",
        "what is my hobby?|what do i do in my free time?|what do i enjoy?|do you remember my hobby?",
        "Your hobby is {v}.",
        "You have not told me your hobby yet.",
        "The user's hobby is {v}.",
    ),
    "word": Fact(
        "the secret word is {v}|the password is {v}|remember the word {v}|the code word is {v}|"
        "the code is {v}|please remember this: {v}",
        "I will remember {v}.|Noted: {v}.|Good, the word is {v}.",
        "what is the secret word?|what was the word?|what is the password?|"
        "which word did i tell you?|what is the code word?|"
        "what is the code?|what did i ask you to remember?|do you remember the word?",
        "The word is {v}.",
        "You have not told me a word yet.",
        "The secret word is {v}.|The code word is {v}.",
    ),
    "friend": Fact(
        "my friend is called {v}|my best friend is {v}|my friend's name is {v}|{v} is my best friend",
        "I will remember your friend {v}.|Greetings to {v}!",
        "what is my friend's name?|who is my friend?|who is my best friend?|"
        "what is my friend called?|do you remember my friend?",
        "Your friend is {v}.",
        "You have not told me about a friend yet.",
        "The user's best friend is {v}.",
    ),
}  # fmt: skip
FACT_KINDS = ("name",) * 6 + tuple(FACTS)


def value_of(rng: Random, kind: str) -> str:
    """Draw a value for a kind of fact, never a held-out one."""
    if kind == "name" or kind == "friend":
        return name_of(rng)
    if kind == "number":
        return str(rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(10, 99), rng.randint(100, 99999))))
    if kind == "color":
        return rng.choice(COLORS) if rng.random() < 0.85 else invent(rng, "color").lower()
    if kind == "pet":
        animal = article(rng.choice(PETS))
        return f"{animal} called {pick(rng, 'name', NAMES)}" if rng.random() < 0.6 else animal
    if kind == "job":
        return article(rng.choice(JOBS))
    if kind == "word":
        return rng.choice(
            (invent(rng, "word"), invent(rng, "word").lower(), rng.choice(FOODS), str(rng.randint(1000, 999999)))
        )
    known = {"city": CITIES, "food": FOODS, "hobby": HOBBIES}[kind]
    return pick(rng, kind, known, invented=0.25 if kind == "city" else 0.0)


class Memory:
    """Facts that one simulated user has stated, and the turns about them."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def state(self, rng: Random, kind: str | None = None) -> Turn:
        """Return a turn in which the user states a fact or corrects it; the last value counts."""
        kind = kind or rng.choice(FACT_KINDS)
        again, value = kind in self.values, value_of(rng, kind)
        question = ask(rng, FACTS[kind].state, v=value)
        if again and not question.startswith(value) and rng.random() < 0.6:
            question = (
                rng.choice(("Actually, ", "actually ", "No, ", "Sorry, ", "Correction: "))
                + question[0].lower()
                + question[1:]
            )
        self.values[kind] = value
        answer = say(rng, FACTS[kind].acknowledge, v=value)
        return Turn(question, answer if kind == "word" else answer[0].upper() + answer[1:])

    def state_two(self, rng: Random) -> Turn:
        """Return a turn in which the user states two facts in one sentence."""
        first, second = rng.sample([kind for kind in dict.fromkeys(FACT_KINDS) if kind not in self.values], 2)
        one, two = self.state(rng, first), self.state(rng, second)
        joint = rng.choice((" and ", " and ", ", and ", ". ", ", "))
        return Turn(f"{one.user.rstrip('.!')}{joint}{two.user}", f"{one.answer} {two.answer}", plain=True)

    def recall(self, rng: Random, kind: str | None = None) -> Turn:
        """Return a turn that asks for a fact that was stated, or rarely for one that was not."""
        if kind is None:
            stated = bool(self.values) and rng.random() < 0.93
            kind = rng.choice(tuple(self.values)) if stated else rng.choice(tuple(FACTS))
        fact = FACTS[kind]
        answer = fact.recall.format(v=self.values[kind]) if kind in self.values else fact.missing
        return Turn(ask(rng, fact.ask), answer)

    def recall_two(self, rng: Random) -> Turn:
        """Return a turn that asks for two stated facts in one sentence."""
        one, two = (self.recall(rng, kind) for kind in rng.sample(tuple(self.values), 2))
        joint = rng.choice((" and ", " and ", "? ", ", and "))
        return Turn(f"{one.user.rstrip('?.!')}{joint}{two.user}", f"{one.answer} {two.answer}", plain=True)

    def recall_all(self, rng: Random) -> Turn:
        """Return a turn that asks for all facts stated so far; the answer lists them in order."""
        question = ask(
            rng,
            "what do you know about me?|what did i tell you?|what do you remember about me?|"
            "tell me all you know about me",
        )
        known = " ".join(FACTS[kind].recall.format(v=value) for kind, value in self.values.items())
        return Turn(question, known or "You have not told me anything yet.")


Style = Callable[[Turn], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Persona:
    """A system prompt, how it changes answers, and the facts about the user in it."""

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
    """Return a turn that asks the assistant to write in another style from now on."""
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
