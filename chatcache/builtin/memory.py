"""Generate what users tell about themselves, and the questions that ask for it later."""

import dataclasses
from random import Random

from chatcache.builtin.language import name_of
from chatcache.builtin.text import Turn, article, ask, invent, pick, say
from chatcache.builtin.words import CITIES, COLORS, FOODS, HOBBIES, JOBS, NAMES, PETS


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Describe one kind of fact: how it is told, acknowledged, asked for and recalled (`{v}` is its value)."""

    tell: str
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
KINDS = ("name",) * 6 + tuple(FACTS)


def value_of(rng: Random, kind: str) -> str:
    """Draw a value for one kind of fact, from the training side."""
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
    """Keep what one simulated user has told so far, and word the turns about it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def tell(self, rng: Random, kind: str | None = None) -> Turn:
        """Tell (or correct) a fact; the last value counts."""
        kind = kind or rng.choice(KINDS)
        again, value = kind in self.values, value_of(rng, kind)
        question = ask(rng, FACTS[kind].tell, v=value)
        if again and not question.startswith(value) and rng.random() < 0.6:
            question = (
                rng.choice(("Actually, ", "actually ", "No, ", "Sorry, ", "Correction: "))
                + question[0].lower()
                + question[1:]
            )
        self.values[kind] = value
        answer = say(rng, FACTS[kind].acknowledge, v=value)
        return Turn(question, answer if kind == "word" else answer[0].upper() + answer[1:])

    def tell_two(self, rng: Random) -> Turn:
        """Tell two facts in one sentence."""
        first, second = rng.sample([kind for kind in dict.fromkeys(KINDS) if kind not in self.values], 2)
        one, two = self.tell(rng, first), self.tell(rng, second)
        joint = rng.choice((" and ", " and ", ", and ", ". ", ", "))
        return Turn(f"{one.user.rstrip('.!')}{joint}{two.user}", f"{one.answer} {two.answer}", plain=True)

    def recall(self, rng: Random, kind: str | None = None) -> Turn:
        """Ask for a fact, told or (rarely) not told."""
        if kind is None:
            told = bool(self.values) and rng.random() < 0.93
            kind = rng.choice(tuple(self.values)) if told else rng.choice(tuple(FACTS))
        fact = FACTS[kind]
        answer = fact.recall.format(v=self.values[kind]) if kind in self.values else fact.missing
        return Turn(ask(rng, fact.ask), answer)

    def recall_two(self, rng: Random) -> Turn:
        """Ask for two told facts in one sentence."""
        one, two = (self.recall(rng, kind) for kind in rng.sample(tuple(self.values), 2))
        joint = rng.choice((" and ", " and ", "? ", ", and "))
        return Turn(f"{one.user.rstrip('?.!')}{joint}{two.user}", f"{one.answer} {two.answer}", plain=True)

    def recall_all(self, rng: Random) -> Turn:
        """Ask for everything told so far, in the order it was first told."""
        question = ask(
            rng,
            "what do you know about me?|what did i tell you?|what do you remember about me?|"
            "tell me all you know about me",
        )
        known = " ".join(FACTS[kind].recall.format(v=value) for kind, value in self.values.items())
        return Turn(question, known or "You have not told me anything yet.")
