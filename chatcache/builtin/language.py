# ruff: noqa: SIM905  (word lists read better as text)
"""Generate turns about words: spelling, letters, days, opposites, rhymes, colours, copying."""

from random import Random

from chatcache.builtin.text import Turn, article, ask, held_out, invent, pick, say
from chatcache.builtin.words import (
    CAPITALS,
    DAYS,
    KINDS,
    MONTHS,
    NAMES,
    OPPOSITES,
    RHYMES,
    SOUNDS,
    SPELLABLE,
    THING_COLORS,
)

SPELL_QUESTIONS = (
    "spell {w}|how do you spell {w}?|spell the word {w}|can you spell {w}?|spell {w} letter by letter|"
    'how is {w} spelled?|please spell "{w}"|what are the letters of {w}?|spell: {w}|spell out {w}'
)
EVERYDAY = tuple({word for words in KINDS.values() for word in words} | set(OPPOSITES) | set(SOUNDS))


def _case(rng: Random, word: str) -> str:
    return rng.choice((word.lower(), word.lower(), word.lower(), word.capitalize(), word.upper()))


def word_to_spell(rng: Random, *, held: bool = False) -> str:
    """Return a word from the training side (or the held-out side) of spelling."""
    while True:
        known = rng.choice(SPELLABLE if rng.random() < 0.5 else EVERYDAY)
        word = known if rng.random() < 0.55 else invent(rng, "spell", held=held)
        if held_out("spell", word) == held:
            return word


def spelled(word: str) -> str:
    """Return the letters of a word in capitals, joined by hyphens."""
    return "-".join(word.upper())


def spell(rng: Random) -> Turn:
    """Ask for the letters of a word."""
    word = _case(rng, word_to_spell(rng))
    choice = rng.random()
    if choice < 0.75:
        return Turn(
            ask(rng, SPELL_QUESTIONS, w=word), f"The word {word} is spelled {spelled(word)}.", f"{spelled(word)}."
        )
    if choice < 0.85:
        question = ask(
            rng, "how many letters are in {w}?|how many letters does {w} have?|count the letters in {w}", w=word
        )
        return Turn(question, f"The word {word} is spelled {spelled(word)}: {len(word)} letters.")
    if choice < 0.93:
        question = ask(
            rng,
            "what letter does {w} start with?|what is the first letter of {w}?|{w} starts with which letter?",
            w=word,
        )
        return Turn(question, f"The word {word} starts with {word[0].upper()}.")
    question = ask(rng, "what letter does {w} end with?|what is the last letter of {w}?", w=word)
    return Turn(question, f"The word {word} is spelled {spelled(word)}. It ends with {word[-1].upper()}.")


def letters(rng: Random) -> Turn:
    """Change the case of words."""
    words = [
        rng.choice(SPELLABLE) if rng.random() < 0.6 else invent(rng, "case") for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]
    text = " ".join(_case(rng, word) for word in words)
    if rng.random() < 0.7:
        question = ask(
            rng,
            "write {w} in capital letters|put {w} in capitals|{w} in uppercase|make {w} uppercase|"
            "write {w} in all caps|"
            "convert {w} to upper case|capitalize {w}|shout {w}",
            w=text,
        )
        return Turn(question, text.upper(), plain=True)
    question = ask(rng, "write {w} in small letters|put {w} in lowercase|{w} in lower case|make {w} lowercase", w=text)
    return Turn(question, text.lower(), plain=True)


def repeat(rng: Random) -> Turn:
    """Ask to say something back word for word."""
    words = [rng.choice(EVERYDAY) if rng.random() < 0.6 else invent(rng, "repeat") for _ in range(rng.randint(1, 6))]
    text = " ".join(words) if rng.random() < 0.7 else str(rng.randint(0, 99999))
    question = ask(
        rng, 'repeat after me: {w}|say {w}|repeat: {w}|say "{w}"|please repeat {w}|echo {w}|can you say {w}?', w=text
    )
    return Turn(question, text, plain=True)


def calendar(rng: Random) -> Turn:
    """Ask for a neighbour among the days, months or letters."""
    circle, noun = rng.choice(
        (
            (DAYS, "day"),
            (DAYS, "day"),
            (MONTHS, "month"),
            (MONTHS, "month"),
            (tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "letter"),
        )
    )
    at = rng.randrange(len(circle) - 2 if noun == "letter" else len(circle))
    here = circle[at] if rng.random() < 0.7 or noun == "letter" else circle[at].lower()
    choice = rng.random()
    if choice < 0.5 or noun == "letter":
        question = ask(
            rng,
            "what {k} comes after {x}?|what comes after {x}?|which {k} follows {x}?|"
            "which {k} is after {x}?|what is the {k} after {x}?|the {k} after {x}?",
            k=noun,
            x=here,
        )
        return Turn(question, f"After {circle[at]} comes {circle[(at + 1) % len(circle)]}.")
    if choice < 0.8:
        question = ask(
            rng,
            "what {k} comes before {x}?|what comes before {x}?|which {k} is before {x}?|what is the {k} before {x}?",
            k=noun,
            x=here,
        )
        return Turn(question, f"Before {circle[at]} comes {circle[at - 1]}.")
    if noun == "day":
        question = ask(
            rng,
            "today is {x}. what day is tomorrow?|if today is {x}, what is tomorrow?|today is {x}, "
            "what day is it tomorrow?",
            x=here,
        )
        return Turn(question, f"After {circle[at]} comes {circle[(at + 1) % 7]}.")
    order = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
    question = ask(
        rng, "what is the {n} month?|which month is the {n}?|what is the {n} month of the year?", n=order[at]
    )
    return Turn(question, f"The {order[at]} month is {circle[at]}.")


def opposite(rng: Random) -> Turn:
    """Ask for the opposite of a word."""
    word = rng.choice(tuple(OPPOSITES))
    question = ask(
        rng,
        "what is the opposite of {w}?|opposite of {w}|the opposite of {w} is?|"
        "what is the contrary of {w}?|antonym of {w}",
        w=word,
    )
    return Turn(question, f"The opposite of {word} is {OPPOSITES[word]}.", f"{OPPOSITES[word].capitalize()}.")


def rhyme(rng: Random) -> Turn:
    """Ask for a rhyme: several are right."""
    first, second = rng.sample(rng.choice(RHYMES).split(), 2)
    question = ask(
        rng,
        "what rhymes with {w}?|give me a rhyme for {w}|find a word that rhymes with {w}|a rhyme for {w}|rhyme with {w}",
        w=first,
    )
    return Turn(question, f"{second.capitalize()} rhymes with {first}.", f"{second.capitalize()}.")


def color_of(rng: Random) -> Turn:
    """Ask for the colour of a thing."""
    thing = rng.choice(tuple(THING_COLORS))
    the = (
        "the "
        if thing in ("sky", "sun", "sea", "night")
        else ""
        if thing in ("grass", "snow", "coal", "blood", "milk", "chocolate")
        else article(thing)[: -len(thing)]
    )
    spelling = rng.choice(("colour", "color"))
    question = ask(
        rng,
        "what {c} is {t}?|which {c} is {t}?|what is the {c} of {t}?|tell me the {c} of {t}|what {c} does {t} have?",
        c=spelling,
        t=the + thing,
    )
    return Turn(
        question, f"{(the + thing).capitalize()} is {THING_COLORS[thing]}.", f"{THING_COLORS[thing].capitalize()}."
    )


def sound(rng: Random) -> Turn:
    """Ask for the sound of an animal."""
    animal = rng.choice(tuple(SOUNDS))
    question = ask(
        rng,
        "what does {t} say?|what sound does {t} make?|what noise does {t} make?|how does {t} go?",
        t=rng.choice((article(animal), f"the {animal}")),
    )
    return Turn(question, f"{article(animal).capitalize()} says {SOUNDS[animal]}.", f"{SOUNDS[animal].capitalize()}.")


def capital(rng: Random) -> Turn:
    """Ask for the capital of a country."""
    country = rng.choice(tuple(CAPITALS))
    question = ask(
        rng,
        "what is the capital of {c}?|capital of {c}|what is the capital city of {c}?|"
        "which city is the capital of {c}?|do you know the capital of {c}?|{c} capital?",
        c=country,
    )
    return Turn(question, f"The capital of {country} is {CAPITALS[country]}.", f"{CAPITALS[country]}.")


def choose(rng: Random) -> Turn:
    """Ask for an opinion or a choice: many right answers."""
    kind = rng.choice(("colour", "color", "animal", "fruit", "food", "city", "number", "name"))
    if rng.random() < 0.5 and kind not in ("number", "food"):
        a, b = rng.sample(list(KINDS[kind]), 2)
        question = ask(
            rng,
            "{a} or {b}?|which do you prefer, {a} or {b}?|do you like {a} or {b} better?|choose: {a} or {b}",
            a=a,
            b=b,
        )
        choice = rng.choice((a, b))
        return Turn(
            question, say(rng, "I would take {c}.|I choose {c}.|{c}, I think.", c=choice), f"{choice.capitalize()}."
        )
    choice = {"number": str(rng.randint(1, 20)), "food": rng.choice(("soup", "bread", "pizza", "cake"))}.get(
        kind
    ) or rng.choice(KINDS[kind])
    if rng.random() < 0.5 or kind == "name":
        question = ask(
            rng, "give me a {k}|name a {k}|suggest a {k}|pick a {k}|say a {k}|tell me a {k}|choose a {k}", k=kind
        )
        return Turn(
            question,
            say(rng, "How about {c}?|{c}, for example.|I suggest {c}.|Let me say {c}.", c=choice),
            f"{choice.capitalize()}.",
        )
    question = ask(
        rng,
        "what is your favourite {k}?|what is your favorite {k}?|do you have a favourite {k}?|which {k} do you like?",
        k=kind,
    )
    return Turn(
        question,
        say(rng, "I like {c}, as far as a model can like anything.|If I had to choose, I would say {c}.", c=choice),
        f"{choice.capitalize()}.",
    )


def name_of(rng: Random) -> str:
    """Return a personal name, known or invented, from the training side."""
    name = pick(rng, "name", NAMES, invented=0.6)
    name += f" {invent(rng, 'name')}" if rng.random() < 0.06 else ""
    return name.lower() if rng.random() < 0.12 else name
