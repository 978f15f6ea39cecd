"""Generate stories, poems, jokes and greetings: questions with very many right answers.

Here several candidates for one prompt differ visibly, which is what n-best and beam search are for.
"""

from random import Random

from chatcache.builtin.text import Turn, article, ask, invent, say
from chatcache.builtin.words import COLORS, HERO_NAMES, HEROES, PLACES, TRAITS, TREASURES

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


def tell(rng: Random, hero: str, sentences: int) -> tuple[str, dict[str, str]]:
    """Return a story of about so many sentences, and what happens in it."""
    slots = _slots(rng, hero)
    middles = rng.sample(MIDDLES.split("|"), max(1, sentences - 4))
    parts = [rng.choice(OPENINGS.split("|")), rng.choice(EVENTS.split("|")), *middles]
    parts += [rng.choice(TWISTS.split("|"))] * (sentences > 3) + [rng.choice(CLOSINGS.split("|"))]
    return _grammar(" ".join(part.format(**slots) for part in parts)), slots


def story(rng: Random) -> list[Turn]:
    """Ask for a story, and perhaps for its details or for another one."""
    topic = rng.random() < 0.65
    hero = rng.choice(HEROES) if not topic or rng.random() < 0.8 else invent(rng, "topic").lower()
    question = ask(rng, STORY_TOPIC_QUESTIONS, t=article(hero)) if topic else ask(rng, STORY_QUESTIONS)
    sentences = rng.choice((4, 5, 6, 6, 7, 8))
    if rng.random() < 0.12:
        question, sentences = question.replace("story", "long story").replace("short long", "long"), 9
        sentences = 9 if "long story" in question else 6
    text, slots = tell(rng, hero, sentences)
    brief, _ = tell(rng, hero, 3)
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
        again, _ = tell(rng, hero if topic else rng.choice(HEROES), rng.choice((5, 6, 7)))
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
    """Ask for a poem of two rhyming couplets."""
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
    """Ask for a joke, and perhaps another one."""
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
    """Greet, thank, or chat about nothing."""
    questions, answers = SMALL_TALK[0] if rng.random() < 0.3 else rng.choice(SMALL_TALK)
    return Turn(ask(rng, questions), say(rng, answers))
