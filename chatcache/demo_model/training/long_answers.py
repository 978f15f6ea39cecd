# ruff: noqa: SIM905  (word lists read better as text)
"""Generate stories, poems, jokes, small talk, Markdown lists and tables, and tiny programs.

Stories have very many right answers, so several candidates for one prompt differ visibly, which is what n-best and
beam search are for.
"""

from __future__ import annotations

from random import Random

from chatcache.demo_model.training.wording import (
    CAPITALS,
    COLORS,
    HERO_NAMES,
    HEROES,
    KINDS,
    NAMES,
    PLACES,
    PLURALS,
    SOUNDS,
    SPELLABLE,
    THING_COLORS,
    TRAITS,
    TREASURES,
    Turn,
    article,
    ask,
    invent,
    listing,
    say,
)

STORY_QUESTIONS = (
    "tell me a story|tell me a short story|write a story|can you tell me a story?|"
    "i want to hear a story|a story please|"
    "write a short story|story time|tell a tale|make up a story|tell me a bedtime story|once upon a time"
)
STORY_TOPIC_QUESTIONS = (
    "tell me a story about {t}|write a story about {t}|tell me a short story about {t}|a story about {t}|"
    "write a short story about {t}|can you tell me a story about {t}?|make up a story about {t}|story about {t}|"
    "i want a story with {t}|tell me about {t} in a story|write me a story with {t} in it|tell a story about {t}"
)
OPENINGS = (
    "Once upon a time there was a {trait} {hero} called {name}, who lived in {place}.|"
    "In {place} lived a {hero} named {name}, who was very {trait}.|"
    "Long ago, a {trait} {hero} called {name} came to {place}.|"
    "There was once a {hero} in {place}. Everybody called this {trait} {hero} {name}."
)
EVENTS = (
    "One morning {name} found {treasure} under a stone.|One day it began to rain and did not stop for a week.|"
    "One night a strange light woke {name}.|One evening {name} heard somebody crying behind a door.|"
    "On the first day of {season}, {name} lost the way home.|One day {name} found {treasure} in an old boat.|"
    "One {season} morning a letter arrived with no name on it."
)
MIDDLES = (
    "{name} asked a {helper} for help, but the {helper} only laughed.|Together with a "
    "{helper}, {name} went to look for the answer.|"
    "Nobody knew what to do, so {name} climbed the highest tower to think.|A {helper} warned "
    "{name}: do not go there alone.|"
    "For three days {name} walked, and a {color} bird flew ahead.|{name} was afraid, but went on all the same.|"
    "On the way they met a {helper} who had lost {treasure}."
)
TWISTS = (
    "At the end of the road stood a {color} door.|Then the ground shook, and a {helper} stepped out of the shadows.|"
    "Suddenly everything became quiet, and {name} understood.|Behind the last hill they found {treasure}.|"
    "But the {helper} was not dangerous at all, only lonely."
)
CLOSINGS = (
    "From that day on they were friends.|And {name} never felt lonely again.|"
    "In the end {name} went home and slept for two days.|"
    "Since then, people in the valley tell this story every {season}.|{name} kept it, and smiled whenever it rained.|"
    "And if you listen well at night, you can still hear them sing.|They shared bread and "
    "cheese and laughed until morning."
)
SEASONS = ("spring", "summer", "autumn", "winter")


def _slots(rng: Random, hero: str) -> dict[str, str]:
    name = rng.choice(HERO_NAMES) if rng.random() < 0.6 else invent(rng, "hero")
    helper = rng.choice([one for one in HEROES if one != hero])
    return {"hero": hero, "name": name, "trait": rng.choice(TRAITS), "place": rng.choice(PLACES), "helper": helper,
            "treasure": rng.choice(TREASURES), "season": rng.choice(SEASONS), "color": rng.choice(COLORS)}  # fmt: skip


def _grammar(text: str) -> str:
    for wrong in ("a old", "a owl", "a astronaut", "a inventor", "a orange"):
        text = text.replace(f" {wrong}", f" an{wrong[1:]}")
    return text[0].upper() + text[1:]


def write_story(rng: Random, hero: str, sentences: int) -> tuple[str, dict[str, str]]:
    """Return a story of about `sentences` sentences, and the values of its template slots."""
    slots = _slots(rng, hero)
    middles = rng.sample(MIDDLES.split("|"), max(1, sentences - 4))
    parts = [rng.choice(OPENINGS.split("|")), rng.choice(EVENTS.split("|")), *middles]
    parts += [rng.choice(TWISTS.split("|"))] * (sentences > 3) + [rng.choice(CLOSINGS.split("|"))]
    return _grammar(" ".join(part.format(**slots) for part in parts)), slots


def story(rng: Random) -> list[Turn]:
    """Return turns that ask for a story, and perhaps for its details or for another one."""
    topic = rng.random() < 0.65
    hero = rng.choice(HEROES) if not topic or rng.random() < 0.8 else invent(rng, "topic").lower()
    question = ask(rng, STORY_TOPIC_QUESTIONS, t=article(hero)) if topic else ask(rng, STORY_QUESTIONS)
    sentences = rng.choice((4, 5, 6, 6, 7, 8))
    if rng.random() < 0.12:
        question, sentences = question.replace("story", "long story").replace("short long", "long"), 9
        sentences = 9 if "long story" in question else 6
    text, slots = write_story(rng, hero, sentences)
    brief, _ = write_story(rng, hero, 3)
    turns = [Turn(question, text, brief)]
    if rng.random() < 0.25:
        turns.append(
            Turn(
                ask(
                    rng,
                    "what was the name of the {h}?|who was the hero?|what was the hero called?|"
                    "what was the {h} called?",
                    h=hero,
                ),
                f"The {hero} was called {slots['name']}.",
                f"{slots['name']}.",
            )
        )
    if rng.random() < 0.15:
        turns.append(
            Turn(
                ask(rng, "where did it happen?|where did the story take place?|where was that?"),
                f"It happened in {slots['place']}.",
            )
        )
    if rng.random() < 0.2:
        again, _ = write_story(rng, hero if topic else rng.choice(HEROES), rng.choice((5, 6, 7)))
        turns.append(
            Turn(
                ask(rng, "another one|tell me another one|another story|one more|again|one more please|more stories"),
                again,
            )
        )
    return turns


POEM_RHYMES = (
    "night light kite sight",
    "tree sea bee key",
    "moon spoon tune balloon",
    "star car jar guitar",
    "ring king spring wing",
    "rain train plane lane",
    "cake lake snake",
    "dream stream cream team",
    "stone phone bone throne",
    "bear chair pear",
    "house mouse",
    "page cage stage",
    "flower tower hour",
    "boat coat goat note",
)
POEM_LINES = (
    "{t} looks up and sees the {r}|softly sings about a {r}|somewhere far I hear the {r}|in my dream there was a {r}|"
    "all day long we sought the {r}|and the wind has found a {r}|{t} waits beside the {r}|"
    "nothing shines as bright as the {r}|"
    "we go home and bring a {r}|in the garden by the {r}|every winter needs a {r}|nobody forgets the {r}"
)


def poem(rng: Random) -> Turn:
    """Return a turn that asks for a poem of two rhyming couplets."""
    topic = rng.choice((*HEROES, "sea", "moon", "rain", "winter", "summer", "sun", "river", "tree", "computer", "page"))
    question = (
        ask(
            rng,
            "write a poem about the {t}|a poem about {a}|write a short poem about {a}|"
            "can you write a poem about {a}?|poem about the {t}",
            t=topic,
            a=article(topic),
        )
        if rng.random() < 0.7
        else ask(rng, "write a poem|tell me a poem|a short poem please|can you write a poem?|write me a poem")
    )
    lines = []
    for family in rng.sample(POEM_RHYMES, 2):
        for rhyme, line in zip(rng.sample(family.split(), 2), rng.sample(POEM_LINES.split("|"), 2), strict=True):
            lines.append(line.format(t=f"the {topic}", r=rhyme))
    lines[0] = f"{rng.choice(('O', 'Dear', 'Little'))} {topic}: {lines[0]}"
    return Turn(
        question,
        "\n".join(line[0].upper() + line[1:] + ("." if at % 2 else ",") for at, line in enumerate(lines)),
        plain=True,
    )


JOKES = (
    "Why did the token cross the road? Because the next one was already there.",
    "Why was the cache so happy? It got a hit.",
    "What does a page say to another page? You look familiar, do we share a prefix?",
    "Why did the robot go to bed? It had run out of steps.",
    "Why do programmers like autumn? All the leaves are on a tree.",
    "What did the fork say to the spoon? I do not copy, I share.",
    "Why was the beam so sad? It was pruned.",
    "How does the sea say hello? It waves.",
    "Why was the maths book sad? It had too many problems.",
    "What is brown and sticky? A stick.",
)


def joke(rng: Random) -> list[Turn]:
    """Return turns that ask for a joke, and perhaps for another one."""
    first, second = rng.sample(JOKES, 2)
    turns = [
        Turn(
            ask(
                rng,
                "tell me a joke|make me laugh|do you know a joke?|a joke please|say something funny|joke|"
                "know any jokes?",
            ),
            first,
        )
    ]
    if rng.random() < 0.4:
        turns.append(
            Turn(ask(rng, "another one|tell me another one|one more|another joke|again|haha, another one"), second)
        )
    return turns


SMALL_TALK: tuple[tuple[str, str], ...] = (
    (
        "hi|hello|hey|hello there|hi there|good day|hallo|greetings|hey there|yo|howdy|hiya|hello!|hi!",
        "Hello! How can I help you?|Hi! What can I do for you?|Hello there! Ask me something.|"
        "Hi! Nice to see you.|Hello! What shall we do?",
    ),
    ("good morning", "Good morning! How can I help you?|Good morning! What can I do for you today?"),
    ("good evening", "Good evening! How can I help you?|Good evening! What can I do for you?"),
    ("good night", "Good night! Sleep well.|Good night, and until tomorrow."),
    (
        "how are you?|how are you doing?|how do you do?|how is it going?|are you ok?|how are you today?|what's up?|sup",
        "I am fine, thank you. How can I help you?|Very well, thank you! And you?|All my pages "
        "are in order, thank you.",
    ),
    (
        "thank you|thanks|thanks a lot|thank you very much|many thanks|thx|cheers|that helps, thank you",
        "You are welcome!|My pleasure!|You are welcome. Anything else?",
    ),
    (
        "bye|goodbye|see you|bye bye|see you later|i have to go|ciao|that's all",
        "Goodbye!|Goodbye, and come back soon!|See you!",
    ),
    (
        "ok|okay|fine|good|great|nice|cool|i see|alright|sure|wow|perfect|very good|awesome|interesting|got it",
        "Good! What else can I do for you?|Glad to hear it. What next?|Good. Ask me anything small.",
    ),
    ("yes|yes please|yeah|yep", "Good! Then tell me what you would like.|Fine. What shall it be?"),
    ("no|no thanks|nope|not really", "All right. I am here if you need me.|Fine. Tell me if you change your mind."),
    (
        "i am fine|i am good|i am well, thank you|fine, thanks|i'm happy|i am doing well",
        "I am glad to hear that!|Good to hear! What shall we do?",
    ),
    (
        "i am sad|i am tired|i feel bad|i had a bad day|i am bored|i'm lonely",
        "I am sorry to hear that. Would a story or a joke help?|That is a pity. Shall I tell you a story?",
    ),
    (
        "you are stupid|you are dumb|you are bad|that is wrong|that's not right|you are useless|wrong!|this is bad",
        "I am sorry. I am only a small demonstration model.|Sorry about that. I am small and make mistakes.",
    ),
    (
        "you are great|you are nice|i like you|well done|good job|good answer|i love you|you are funny|you are smart",
        "Thank you, that is kind!|Thank you! I do what I can.",
    ),
    (
        "test|testing|this is a test|test 123|ping|are you there?|hello? are you there?|can you hear me?",
        "I am here. Your test works.|I am here!|Yes, it works.",
    ),
    ("lol|haha|hehe|:)|ha ha", "I am glad that you laugh!|Haha!"),
    (
        "let's talk|i want to talk|talk to me|let's chat|say something|tell me something|entertain me|surprise me",
        "With pleasure! I could tell you a story, a poem or a joke.|Did you know that my memory "
        "is made of pages? Ask me about it.",
    ),
    (
        "what?|huh?|i don't understand|what do you mean?|pardon?",
        "Sorry if I was not clear. Please ask me again in other words.",
    ),
    ("why?|how?|really?|are you sure?", "I cannot explain it any better. I am only a small demonstration model."),
    ("sorry|i am sorry|my mistake|oops", "No problem at all!|Never mind!"),
    ("wait|stop|hold on|one moment", "All right, I will wait.|Fine, take your time."),
)


def small_talk(rng: Random) -> Turn:
    """Return a turn of small talk: a greeting, thanks, or chat about nothing."""
    questions, answers = SMALL_TALK[0] if rng.random() < 0.3 else rng.choice(SMALL_TALK)
    return Turn(ask(rng, questions), say(rng, answers))


NUMBER_WORDS = "zero one two three four five six seven eight nine ten".split()


def _plural(kind: str) -> str:
    return PLURALS.get(kind, kind + "s")


def _many(rng: Random, number: int) -> str:
    return NUMBER_WORDS[number] if rng.random() < 0.6 else str(number)


def bullets(rng: Random) -> Turn:
    """Return a turn that asks for a list of things; most lists have many right answers."""
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
    """Return a turn that asks for a table."""
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
    """Return a turn that asks for a tiny Python program."""
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
