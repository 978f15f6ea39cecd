# ruff: noqa: SIM905  (word lists read better as text)
"""Generate turns about numbers and words: sums, counting, spelling, letters, opposites.

Every sum is answered as `23 + 45 = 68.` whatever the question's wording: the operands stand next to the
result, so one small circuit serves all phrasings.
"""

from __future__ import annotations

from random import Random

from chatcache.demo_model.training.wording import (
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
    Turn,
    article,
    ask,
    held_out,
    invent,
    pick,
    say,
)

SUM_QUESTIONS = (
    "what is {a} + {b}?|{a} + {b}|{a}+{b}|{a} + {b} =|{a}+{b}=?|what is {a} plus {b}?|{a} plus {b}|calculate {a} + {b}|"
    "how much is {a} + {b}?|how much is {a} plus {b}?|add {a} and {b}|what is the sum of {a} and {b}?|compute {a}+{b}|"
    "i have {a} apples and get {b} more. how many do i have?|can you add {a} and {b}?|what does {a} + {b} equal?"
)
DIFFERENCE_QUESTIONS = (
    "what is {a} - {b}?|{a} - {b}|{a}-{b}|{a} - {b} =|what is {a} minus {b}?|{a} minus {b}|calculate {a} - {b}|"
    "how much is {a} - {b}?|subtract {b} from {a}|take {b} away from {a}|"
    "i had {a} coins and lost {b}. how many are left?"
)
PRODUCT_QUESTIONS = (
    "what is {a} * {b}?|{a} * {b}|{a}*{b}|{a} x {b}|what is {a} times {b}?|{a} times {b}|calculate {a} * {b}|"
    "multiply {a} by {b}|how much is {a} times {b}?|what is {a} x {b}?"
)


def _operands(rng: Random, held: bool) -> tuple[int, int]:
    """Return two numbers: of two digits each if `held` (for held-out pairs), else often smaller."""
    kind = 1.0 if held else rng.random()
    one = rng.randint(0, 9) if kind < 0.40 else rng.randint(10, 99)
    other = rng.randint(0, 9) if kind < 0.35 or 0.40 < kind < 0.45 else rng.randint(10, 99)
    return one, other


def _is_held_out(kind: str, a: int, b: int) -> bool:
    """Return whether a pair is held out; only pairs of two-digit numbers can be."""
    return min(a, b) >= 10 and held_out(kind, (a, b))


def sum_pair(rng: Random, *, held: bool = False) -> tuple[int, int]:
    """Return two addends: a held-out pair if `held`, else one for training."""
    while True:
        a, b = _operands(rng, held)
        if _is_held_out("sum", min(a, b), max(a, b)) == held:
            return a, b


def difference_pair(rng: Random, *, held: bool = False) -> tuple[int, int]:
    """Return two numbers, the larger first: a held-out pair if `held`, else one for training."""
    while True:
        one, other = _operands(rng, held)
        a, b = max(one, other), min(one, other)
        if _is_held_out("difference", a, b) == held:
            return a, b


def sums(rng: Random) -> Turn:
    """Return a turn that asks for one sum, difference or product."""
    choice = rng.random()
    if choice < 0.6:
        a, b = sum_pair(rng)
        return Turn(ask(rng, SUM_QUESTIONS, a=a, b=b), f"{a} + {b} = {a + b}.")
    if choice < 0.82:
        a, b = difference_pair(rng)
        return Turn(ask(rng, DIFFERENCE_QUESTIONS, a=a, b=b), f"{a} - {b} = {a - b}.")
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return Turn(ask(rng, PRODUCT_QUESTIONS, a=a, b=b), f"{a} * {b} = {a * b}.")


def drill(rng: Random) -> Turn:
    """Return a turn that asks for several sums or differences at once, for dense practice."""
    sign, draw = ("+", sum_pair) if rng.random() < 0.75 else ("-", difference_pair)
    pairs = [draw(rng) for _ in range(rng.randint(3, 8))]
    task = rng.choice((", ", ", ", "; ", "\n")).join(f"{a} {sign} {b}" for a, b in pairs)
    question = ask(rng, "solve {t}|calculate {t}|what are {t}?|compute these: {t}", t=task)
    return Turn(question, "\n".join(f"{a} {sign} {b} = {a + b if sign == '+' else a - b}" for a, b in pairs))


def too_large(rng: Random) -> Turn:
    """Return a turn that asks for arithmetic that the model never learned; the answer declines.

    Sums beyond two digits or of more than two numbers, and divisions.
    """
    if rng.random() < 0.4:
        a, b = rng.randint(1, 99), rng.randint(1, 20)
        return Turn(
            ask(rng, "what is {a} / {b}?|{a} divided by {b}|divide {a} by {b}|{a} / {b}", a=a, b=b),
            "I never learned to divide. I can add, subtract and do small multiplications.",
        )
    if rng.random() < 0.2:
        numbers = " + ".join(str(rng.randint(1, 99)) for _ in range(rng.randint(3, 5)))
        return Turn(
            ask(rng, "what is {t}?|{t}|calculate {t}|{t} =", t=numbers), "I can only add two numbers at a time."
        )
    a, b = rng.randint(100, 10 ** rng.randint(3, 6)), rng.randint(10, 10 ** rng.randint(2, 6))
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    question = ask(rng, rng.choice((SUM_QUESTIONS, DIFFERENCE_QUESTIONS, PRODUCT_QUESTIONS)), a=a, b=b)
    return Turn(question, "Those numbers are too large for me. I only calculate with numbers below 100.")


def compare(rng: Random) -> Turn:
    """Return a turn about numbers: which is larger, which is adjacent, or odd or even."""
    a, b = rng.sample(range(100), 2)
    choice = rng.randrange(4)
    if choice == 0:
        question = ask(
            rng, "which is bigger, {a} or {b}?|which number is larger: {a} or {b}?|is {a} bigger than {b}?", a=a, b=b
        )
        return Turn(question, f"{max(a, b)} is bigger than {min(a, b)}.")
    if choice == 1:
        question = ask(rng, "is {a} odd or even?|is {a} even?|is {a} an odd number?|{a}: odd or even?", a=a)
        return Turn(question, f"{a} is {'odd' if a % 2 else 'even'}.")
    if choice == 2:
        question = ask(
            rng,
            "what comes after {a}?|which number comes after {a}?|what number follows {a}?|next number after {a}",
            a=a,
        )
        return Turn(question, f"After {a} comes {a + 1}.")
    question = ask(rng, "what comes before {a}?|which number comes before {a}?|what is the number before {a}?", a=a + 1)
    return Turn(question, f"Before {a + 1} comes {a}.")


def count(rng: Random) -> Turn:
    """Return a turn that asks to count up, down or in steps."""
    if rng.random() < 0.08:
        end = rng.choice((50, 100, 100, 1000, rng.randint(31, 999)))
        question = ask(rng, "count to {e}|can you count to {e}?|count up to {e}|count from 1 to {e}", e=end)
        return Turn(question, ", ".join(map(str, range(1, 21))) + f" and so on, up to {end}.")
    choice = rng.randrange(4)
    if choice == 0:
        end = rng.choice((3, 5, 10, 10, 12, 15, 20, rng.randint(2, 30)))
        question = ask(
            rng, "count to {e}|can you count to {e}?|count up to {e}|count from 1 to {e}|count until {e}", e=end
        )
        numbers = range(1, end + 1)
    elif choice == 1:
        start = rng.randint(2, 60)
        end = start + rng.randint(2, 14)
        question = ask(
            rng, "count from {s} to {e}|count up from {s} to {e}|list the numbers from {s} to {e}", s=start, e=end
        )
        numbers = range(start, end + 1)
    elif choice == 2:
        start = rng.choice((3, 5, 10, 10, rng.randint(2, 25)))
        question = ask(
            rng, "count down from {s}|count backwards from {s}|countdown from {s}|count down from {s} to 1", s=start
        )
        numbers = range(start, 0, -1)
    else:
        step, many = rng.choice((2, 3, 5, 10)), rng.randint(3, 10)
        word = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}[step]
        question = ask(rng, "count by {w} to {e}|count in {w} up to {e}|count in {w} to {e}", w=word, e=step * many)
        numbers = range(step, step * many + 1, step)
    return Turn(question, ", ".join(map(str, numbers)) + ".")


def puzzle(rng: Random) -> Turn:
    """Return a turn that asks the model to pick a number; many answers are right."""
    low, high = rng.choice(((1, 10), (1, 100), (1, 6), (10, 99)))
    question = ask(
        rng,
        "give me a random number between {l} and {h}|pick a number between {l} and {h}|"
        "choose a number from {l} to {h}|think of a number between {l} and {h}",
        l=low,
        h=high,
    )
    number = rng.randint(low, high)
    return Turn(question, say(rng, "I pick {n}.|My number is {n}.|Let us take {n}.|{n} it is.", n=number), f"{number}.")


def roll_die(rng: Random) -> Turn:
    """Return a turn that asks to roll a die or to flip a coin."""
    if rng.random() < 0.5:
        side = rng.choice(("heads", "tails"))
        question = ask(rng, "flip a coin|toss a coin|heads or tails?")
        return Turn(question, say(rng, "It shows {s}.|The coin landed on {s}.", s=side), side.capitalize() + ".")
    question = ask(rng, "roll a die|roll a dice|throw a die for me")
    face = rng.randint(1, 6)
    return Turn(question, f"You rolled {article(str(face)) if face != 8 else face}.".replace("a 8", "an 8"), f"{face}.")


SPELL_QUESTIONS = (
    "spell {w}|how do you spell {w}?|spell the word {w}|can you spell {w}?|spell {w} letter by letter|"
    'how is {w} spelled?|please spell "{w}"|what are the letters of {w}?|spell: {w}|spell out {w}'
)
EVERYDAY = tuple({word for words in KINDS.values() for word in words} | set(OPPOSITES) | set(SOUNDS))


def _case(rng: Random, word: str) -> str:
    return rng.choice((word.lower(), word.lower(), word.lower(), word.capitalize(), word.upper()))


def word_to_spell(rng: Random, *, held: bool = False) -> str:
    """Return a word for a spelling question: a held-out word if `held`, else one for training."""
    while True:
        known = rng.choice(SPELLABLE if rng.random() < 0.5 else EVERYDAY)
        word = known if rng.random() < 0.55 else invent(rng, "spell", held=held)
        if held_out("spell", word) == held:
            return word


def spelled(word: str) -> str:
    """Return the letters of a word in capitals, joined by hyphens."""
    return "-".join(word.upper())


def spell(rng: Random) -> Turn:
    """Return a turn that asks for the letters of a word, or for their number."""
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
    """Return a turn that asks to write words in capital or in small letters."""
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
    """Return a turn that asks to repeat something word for word."""
    words = [rng.choice(EVERYDAY) if rng.random() < 0.6 else invent(rng, "repeat") for _ in range(rng.randint(1, 6))]
    text = " ".join(words) if rng.random() < 0.7 else str(rng.randint(0, 99999))
    question = ask(
        rng, 'repeat after me: {w}|say {w}|repeat: {w}|say "{w}"|please repeat {w}|echo {w}|can you say {w}?', w=text
    )
    return Turn(question, text, plain=True)


def calendar(rng: Random) -> Turn:
    """Return a turn that asks for the next or previous day, month or letter."""
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
    """Return a turn that asks for the opposite of a word."""
    word = rng.choice(tuple(OPPOSITES))
    question = ask(
        rng,
        "what is the opposite of {w}?|opposite of {w}|the opposite of {w} is?|"
        "what is the contrary of {w}?|antonym of {w}",
        w=word,
    )
    return Turn(question, f"The opposite of {word} is {OPPOSITES[word]}.", f"{OPPOSITES[word].capitalize()}.")


def rhyme(rng: Random) -> Turn:
    """Return a turn that asks for a rhyme; several answers are right."""
    first, second = rng.sample(rng.choice(RHYMES).split(), 2)
    question = ask(
        rng,
        "what rhymes with {w}?|give me a rhyme for {w}|find a word that rhymes with {w}|a rhyme for {w}|rhyme with {w}",
        w=first,
    )
    return Turn(question, f"{second.capitalize()} rhymes with {first}.", f"{second.capitalize()}.")


def color_of(rng: Random) -> Turn:
    """Return a turn that asks for the colour of a thing."""
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
    """Return a turn that asks for the sound of an animal."""
    animal = rng.choice(tuple(SOUNDS))
    question = ask(
        rng,
        "what does {t} say?|what sound does {t} make?|what noise does {t} make?|how does {t} go?",
        t=rng.choice((article(animal), f"the {animal}")),
    )
    return Turn(question, f"{article(animal).capitalize()} says {SOUNDS[animal]}.", f"{SOUNDS[animal].capitalize()}.")


def capital(rng: Random) -> Turn:
    """Return a turn that asks for the capital of a country."""
    country = rng.choice(tuple(CAPITALS))
    question = ask(
        rng,
        "what is the capital of {c}?|capital of {c}|what is the capital city of {c}?|"
        "which city is the capital of {c}?|do you know the capital of {c}?|{c} capital?",
        c=country,
    )
    return Turn(question, f"The capital of {country} is {CAPITALS[country]}.", f"{CAPITALS[country]}.")


def choose(rng: Random) -> Turn:
    """Return a turn that asks for an opinion or a choice; many answers are right."""
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
    """Return a personal name, known or invented, never a held-out one."""
    name = pick(rng, "name", NAMES, invented=0.6)
    name += f" {invent(rng, 'name')}" if rng.random() < 0.06 else ""
    return name.lower() if rng.random() < 0.12 else name
