# ruff: noqa: SIM905  (word lists read better as text)
"""Generate questions beyond the model, answered by saying so."""

from random import Random

from chatcache.builtin.text import Turn, ask, invent, say
from chatcache.builtin.words import CITIES, JOBS, KINDS, NAMES

QUESTIONS = (
    "who won the {t} cup in {y}?|what happened in {y}?|who is the president of {t}?|"
    "what is the weather in {t}?|what time is it?|"
    "what is the weather today?|what day is it today?|what is the date?|explain quantum {t}|translate {t} into French|"
    "how do i repair my {t}?|what is the price of {t}?|who wrote {t}?|"
    "what does {t} mean in German?|how far is {t} from {u}?|"
    "write an essay about {t}|summarize the book {t}|who is {t}?|tell me the history of {t}|"
    "how many people live in {t}?|"
    "what is the best {t} in {u}?|can you book a flight to {t}?|send an email to {t}|what is the stock price of {t}?|"
    "recommend a movie about {t}|how do i cook {t}?|what is the formula for {t}?|"
    "why is the {t} so {u}?|where can i buy {t}?|"
    "what are the latest news about {t}?|how does a {t} work?|what is {t}?|who invented the {t}?|when was {t} born?|"
    "play music by {t}|solve the equation {t}|is {t} better than {u}?|"
    "what should i wear in {t}?|open the {t}|explain {t} to a child|"
    "give me a recipe for {t}|should i buy a {t}?|how old is {t}?|"
    "what is the difference between {t} and {u}?|how tall is {t}?|"
    "what do you think about {t}?|fix this bug: {t}|write javascript code for {t}|"
    "what is the population of {t}?|where is {t}?|"
    "what causes {t}?|are {t} dangerous?|can {t} fly?|does {t} hurt?|which {t} is the fastest?|what do {t} eat?"
)
TOPICS = (
    "gravity democracy inflation photosynthesis bicycle football climate volcano electricity "
    "blockchain medicine evolution "
    "philosophy shampoo laptop telephone dishwasher bitcoin tax insurance marathon opera "
    "chemistry biology physics algebra "
    "relativity dinosaurs sharks mountains rivers religion politics marketing sleep money "
    "love war peace music art history"
).split()
ANSWERS = (
    "I do not know that. I am only a small demonstration model.|Sorry, I do not know. I am a "
    "small demonstration model.|"
    "That is beyond me: I am only a small demonstration model.|I am afraid I do not know. "
    "Ask me for a story, a sum or a list instead."
)
NOISE = "asdf|qwerty|???|...|blah blah|lorem ipsum|abc|xyz|foo bar|hjkl|1 2 3|bla"


def _topic(rng: Random) -> str:
    choice = rng.random()
    if choice < 0.5:
        return rng.choice(TOPICS)
    if choice < 0.7:
        return rng.choice((rng.choice(CITIES), rng.choice(JOBS), rng.choice(NAMES), rng.choice(KINDS["tool"])))
    word = invent(rng, "unknown")
    return word if rng.random() < 0.5 else f"{word.lower()} {rng.choice(TOPICS)}"


def unknown(rng: Random) -> Turn:
    """Ask something that the model cannot know, or type nonsense."""
    if rng.random() < 0.08:
        return Turn(ask(rng, NOISE), "I did not understand that. Ask me for a story, a sum or a list.")
    question = ask(rng, QUESTIONS, t=_topic(rng), u=_topic(rng), y=rng.randint(1900, 2030))
    return Turn(question, say(rng, ANSWERS), "I do not know.")
