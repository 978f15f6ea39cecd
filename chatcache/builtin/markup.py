# ruff: noqa: SIM905  (word lists read better as text)
"""Generate turns answered in Markdown: lists, tables and tiny Python programs."""

from random import Random

from chatcache.builtin.text import Turn, ask, invent, listing
from chatcache.builtin.words import CAPITALS, KINDS, NAMES, PLURALS, SOUNDS, SPELLABLE, THING_COLORS

NUMBER_WORDS = "zero one two three four five six seven eight nine ten".split()


def _plural(kind: str) -> str:
    return PLURALS.get(kind, kind + "s")


def _many(rng: Random, number: int) -> str:
    return NUMBER_WORDS[number] if rng.random() < 0.6 else str(number)


def bullets(rng: Random) -> Turn:
    """Ask for a list of things; most lists have a great many right answers."""
    kind = rng.choice(tuple(KINDS))
    number = rng.randint(2, min(7, len(KINDS[kind])))
    items = rng.sample(list(KINDS[kind]), number)
    style = rng.randrange(4)
    slots = {"n": _many(rng, number), "k": _plural(kind)}
    if style == 0:
        question = ask(rng, "name {n} {k}|tell me {n} {k}|give me {n} {k}|can you name {n} {k}?|{n} {k}", **slots)
        return Turn(
            question, listing(items).capitalize() + "." if kind not in ("city", "name") else listing(items) + "."
        )
    if style == 1:
        question = ask(
            rng,
            "make a numbered list of {n} {k}|write a numbered list of {n} {k}|"
            "numbered list of {n} {k}|list {n} {k} with numbers",
            **slots,
        )
        return Turn(question, "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1)), plain=True)
    question = ask(
        rng,
        "list {n} {k}|make a list of {n} {k}|write a bulleted list of {n} {k}|"
        "make a bullet list of {n} {k}|a list of {n} {k}|"
        "give me a bulleted list of {n} {k}|write a list with {n} {k}|"
        "list of {n} {k} in markdown|write {n} {k} as bullet points",
        **slots,
    )
    if rng.random() < 0.3:
        items = rng.sample(list(KINDS[kind]), min(3, len(KINDS[kind])))
        question = ask(
            rng,
            "list some {k}|make a list of {k}|write a bulleted list of {k}|bullet list of {k}|"
            "give me a list of {k}|list {k}",
            **slots,
        )
    return Turn(question, "\n".join(f"- {item}" for item in items), plain=True)


def markdown_table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """Return a two-column Markdown table."""
    return "\n".join(f"| {left} | {right} |" for left, right in (header, ("---", "---"), *rows))


def table(rng: Random) -> Turn:
    """Ask for a table."""
    header, source, words = rng.choice(
        (
            (("Animal", "Sound"), SOUNDS, "animals and their sounds|animals and sounds|animal sounds"),
            (
                ("Country", "Capital"),
                CAPITALS,
                "countries and their capitals|countries and capitals|capitals|countries",
            ),
            (
                ("Thing", "Colour"),
                THING_COLORS,
                "things and their colours|things and colours|colours|things and their colors|fruits and their colours",
            ),
            (
                ("Number", "Square"),
                {str(n): str(n * n) for n in range(1, 11)},
                "numbers and their squares|squares|numbers",
            ),
        )
    )
    keys = list(source)
    number = rng.randint(2, 5)
    chosen = keys[:number] if header[0] == "Number" else rng.sample(keys, number)
    slots = {"n": _many(rng, number), "w": rng.choice(words.split("|"))}
    if rng.random() < 0.5:
        question = ask(
            rng,
            "make a table with {n} {w}|make a table of {n} {w}|write a markdown table of {n} {w}|a table with {n} {w}",
            **slots,
        )
    else:
        chosen = keys[:3] if header[0] == "Number" else rng.sample(keys, 3)
        question = ask(
            rng,
            "make a table of {w}|write a table of {w}|show me a table of {w}|"
            "a markdown table with {w}|markdown table of {w}|create a table of {w}|"
            "can you make a table of {w}?",
            **slots,
        )
    if rng.random() < 0.2:
        chosen = ["cat", "dog", "cow"]
        header, source = ("Animal", "Sound"), SOUNDS
        question = ask(
            rng, "make a table|write a markdown table|show me a table|can you make a table?|a table please|table"
        )
    return Turn(question, markdown_table(header, [(key, source[key]) for key in chosen]), plain=True)


PROGRAMS: tuple[tuple[str, str], ...] = (
    ("prints {w}|that says {w}|to print {w}|which prints {w}|printing {w}", 'print("{w}")'),
    ("prints {w} {n} times|that says {w} {n} times", 'for _ in range({n}):\n    print("{w}")'),
    (
        "counts to {n}|that prints the numbers from 1 to {n}|to count to {n}",
        "for i in range(1, {n} + 1):\n    print(i)",
    ),
    ("counts down from {n}|to count down from {n}", "for i in range({n}, 0, -1):\n    print(i)"),
    ("adds two numbers|to add two numbers|with a function that adds two numbers", "def add(a, b):\n    return a + b"),
    ("squares a number|to square a number|for the square of a number", "def square(x):\n    return x * x"),
    ("reverses a string|to reverse a string", "def reverse(text):\n    return text[::-1]"),
    ("greets {w}|that says hello to {w}", 'print("Hello, {w}!")'),
    ("adds {a} and {b}|to add {a} and {b}|that prints {a} + {b}", "print({a} + {b})"),
    (
        "finds the largest number|for the maximum of a list|to find the maximum of a list",
        "def largest(numbers):\n    return max(numbers)",
    ),
    ("sums a list|for the sum of a list|to sum a list", "def total(numbers):\n    return sum(numbers)"),
    ("checks if a number is even|to check for even numbers", "def is_even(n):\n    return n % 2 == 0"),
    ("reads a file|to read a file", 'with open("file.txt") as file:\n    print(file.read())'),
    ("prints the even numbers up to {n}", "for i in range(2, {n} + 1, 2):\n    print(i)"),
    (
        "computes the factorial|for the factorial of a number",
        "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    ),
)


def program(rng: Random) -> Turn:
    """Ask for a tiny Python program."""
    tasks, body = PROGRAMS[0] if rng.random() < 0.25 else rng.choice(PROGRAMS)
    word = rng.choice(
        (
            "hello",
            "hello",
            "Hello, world!",
            "hello world",
            rng.choice(SPELLABLE),
            rng.choice(NAMES),
            invent(rng, "code"),
        )
    )
    slots = {"w": word, "n": rng.randint(2, 20), "a": rng.randint(1, 99), "b": rng.randint(1, 99)}
    task = rng.choice(tasks.split("|"))
    joint = "" if task.split()[0] in ("that", "to", "which", "printing", "with", "for") else "that "
    question = ask(
        rng,
        "write python code {t}|write a python program {t}|python code {t}|write a program {t}|"
        "can you write python code {t}?|write code {t}|write a small python script {t}",
        t=joint + task.format(**slots),
    )
    if rng.random() < 0.12:
        question, body = (
            ask(
                rng,
                "write python code|write some code|show me some python|write a python program|"
                "can you code?|can you write code?|write a program",
            ),
            'print("{w}")',
        )
        slots["w"] = "hello"
    return Turn(question, f"```python\n{body.format(**slots)}\n```", plain=True)
