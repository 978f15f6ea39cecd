"""Generate turns about numbers.

Every sum is answered as `23 + 45 = 68.` whatever the question's wording: the operands stand next to the
result, so one small circuit serves all phrasings.
"""

from random import Random

from chatcache.builtin.text import Turn, article, ask, held_out, say

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
    """Return two numbers: of two digits each if `held`, else often small ones, since they are what people try first."""
    kind = 1.0 if held else rng.random()
    one = rng.randint(0, 9) if kind < 0.40 else rng.randint(10, 99)
    other = rng.randint(0, 9) if kind < 0.35 or 0.40 < kind < 0.45 else rng.randint(10, 99)
    return one, other


def _is_held_out(kind: str, a: int, b: int) -> bool:
    """Only pairs of two-digit numbers are held out: of one-digit sums there are too few to spare any."""
    return min(a, b) >= 10 and held_out(kind, (a, b))


def sum_pair(rng: Random, *, held: bool = False) -> tuple[int, int]:
    """Return two addends from the training side (or the two-digit held-out side); order does not matter."""
    while True:
        a, b = _operands(rng, held)
        if _is_held_out("sum", min(a, b), max(a, b)) == held:
            return a, b


def difference_pair(rng: Random, *, held: bool = False) -> tuple[int, int]:
    """Return two numbers, the larger one first, from the training side (or the two-digit held-out side)."""
    while True:
        one, other = _operands(rng, held)
        a, b = max(one, other), min(one, other)
        if _is_held_out("difference", a, b) == held:
            return a, b


def sums(rng: Random) -> Turn:
    """Ask for one sum, or one difference or product."""
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
    """Ask for several sums or differences at once: dense practice for few tokens."""
    sign, draw = ("+", sum_pair) if rng.random() < 0.75 else ("-", difference_pair)
    pairs = [draw(rng) for _ in range(rng.randint(3, 8))]
    task = rng.choice((", ", ", ", "; ", "\n")).join(f"{a} {sign} {b}" for a, b in pairs)
    question = ask(rng, "solve {t}|calculate {t}|what are {t}?|compute these: {t}", t=task)
    return Turn(question, "\n".join(f"{a} {sign} {b} = {a + b if sign == '+' else a - b}" for a, b in pairs))


def too_large(rng: Random) -> Turn:
    """Decline sums beyond two digits and divisions."""
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
    """Compare two numbers, name a neighbour, or tell odd from even."""
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
    """Count up, down or in steps."""
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
    """Ask for a number of the user's choice: many right answers."""
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


def dice(rng: Random) -> Turn:
    """Roll a die or flip a coin."""
    if rng.random() < 0.5:
        side = rng.choice(("heads", "tails"))
        question = ask(rng, "flip a coin|toss a coin|heads or tails?")
        return Turn(question, say(rng, "It shows {s}.|The coin landed on {s}.", s=side), side.capitalize() + ".")
    question = ask(rng, "roll a die|roll a dice|throw a die for me")
    face = rng.randint(1, 6)
    return Turn(question, f"You rolled {article(str(face)) if face != 8 else face}.".replace("a 8", "an 8"), f"{face}.")
