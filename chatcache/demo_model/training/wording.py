# ruff: noqa: SIM905  (word lists read better as text)
"""Turn templates into the wording of users (typos, politeness); word lists.

Values whose hash falls into the held-out tenth never appear in training.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from random import Random

SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi fo ga go gu ha he hi ho ja jo ju ka ke ki ko ku la le li lo lu ma me mi mo "
    "mu na ne ni no nu pa pe pi po qua ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi xa xi ya yo "
    "za ze zi zo bra cle dri fro gle kri plo pra ska spi sto sha che tha tri wen lar min dor rin sel nor val gan tis"
).split()
ENDINGS = ("", "", "", "n", "r", "s", "l", "x", "th", "m", "k", "nd", "ck", "sh")
ONE_IN_HELD_OUT = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A question of the user and the answer of the assistant.

    `brief` is the answer of a terse assistant, `plain` forbids restyling of the words, and `becomes` names the style
    of the assistant from this answer on.
    """

    user: str
    answer: str
    brief: str = ""
    plain: bool = False
    becomes: str = ""


def held_out(kind: str, value: object) -> bool:
    """Return whether a value belongs to the held-out tenth that training never sees."""
    digest = hashlib.sha256(f"{kind}:{str(value).lower()}".encode()).digest()
    return digest[0] * 256 + digest[1] < 65536 // ONE_IN_HELD_OUT


def invent(rng: Random, kind: str, *, held: bool = False) -> str:
    """Return an invented capitalised word of `kind`: held-out if `held`, else for training."""
    while True:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 2, 3)))) + rng.choice(ENDINGS)
        if held_out(kind, word) == held:
            return word.capitalize()


def pick(rng: Random, kind: str, known: Sequence[str], *, invented: float = 0.5) -> str:
    """Return a known or an invented value of `kind`, never a held-out one."""
    if rng.random() < invented:
        return invent(rng, kind)
    while held_out(kind, value := rng.choice(known)):
        continue
    return value


def article(noun: str) -> str:
    """Put `a` or `an` in front of a noun."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def listing(items: Sequence[str]) -> str:
    """Join items as English does: `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def first_sentence(text: str) -> str:
    """Return the text up to and including its first sentence end."""
    ends = [at for mark in ".!?" if (at := text.find(mark + " ")) > 0]
    return text[: min(ends) + 1] if ends else text


OPENERS = ("please ", "hey, ", "ok, ", "ok ", "so ", "can you tell me ", "tell me, ", "now ", "and ", "well, ", "hi, ")
CLOSERS = (" please", ", please", " thanks", " now", " for me", " then")


def _contract(rng: Random, text: str) -> str:
    for long, forms in (("what is", ("what's", "whats")), ("who is", ("who's",)), ("do not", ("don't", "dont")),
                        ("i am", ("I'm", "im", "I am")), ("you are", ("you're",))):  # fmt: skip
        if long in text and rng.random() < 0.5:
            text = text.replace(long, rng.choice(forms))
    return text


def _typo(rng: Random, text: str) -> str:
    at = rng.randrange(len(text))
    return text[:at] + text[at + 1 :]


def wording(rng: Random, template: str, slots: Mapping[str, object]) -> str:
    """Fill a lower-case template as a user would write it, with typos and polite words."""
    text = _contract(rng, template)
    mark = text[-1] if text[-1] in "?.!" else ""
    text = text.removesuffix(mark) if mark else text
    if rng.random() < 0.08:
        text = rng.choice(OPENERS) + text
    if rng.random() < 0.07:
        text += rng.choice(CLOSERS)
    if not slots and len(text) > 6 and rng.random() < 0.04:
        text = _typo(rng, text)
    if rng.random() < 0.6 and text[0] != "{":
        text = text[0].upper() + text[1:]
    if not slots and rng.random() < 0.03:
        text = text.upper()
    text += rng.choice((mark, mark, mark, "", "", "." if mark != "?" else "?", "!" if mark != "?" else "??"))
    return text.format(**slots) if slots else text


def ask(rng: Random, templates: str, **slots: object) -> str:
    """Choose one of the `|`-separated templates and word it as a user would."""
    return wording(rng, rng.choice(templates.split("|")), slots)


def say(rng: Random, templates: str, **slots: object) -> str:
    """Choose one of the `|`-separated answers and fill it; answers are always cleanly written."""
    return rng.choice(templates.split("|")).format(**slots)


NAMES = (
    "Ada Alan Grace Linus Anna Ben Clara David Emma Felix Greta Hugo Ida Jack Kate Leo Maria Nina Oscar Paula Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yuki Zoe Alice Bob Carol Dan Eve Frank Heidi Ivan Judy Mallory Olivia "
    "Peter Ravi Sara Tom Ursula Vera Will John Jane Mary Mike Max Mia Noah Liam Lucas Sophie Lena Paul Laura Omar "
    "Fatima Chen Wei Aisha Kofi Priya Arjun Elena Marco Luca Sofia Diego Carlos Pedro Ines Jonas Lars Erik Freya"
).split()
COLORS = "red blue green yellow orange purple pink brown black white grey turquoise gold silver violet crimson".split()
PETS = "cat dog rabbit hamster parrot goldfish turtle horse snake lizard pony canary".split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Oslo Lisbon Prague Dublin Athens Tokyo Cairo Lima Delhi Sydney Toronto "
    "Boston Chicago Zurich Geneva Munich Hamburg Milan Nairobi Seoul Kyoto Warsaw Helsinki Stockholm"
).split()
FOODS = "pizza pasta rice soup bread cheese salad curry sushi tacos pancakes noodles chocolate cake".split()
HOBBIES = "chess painting swimming reading cooking running gardening singing dancing cycling hiking sewing".split()
JOBS = "teacher doctor nurse baker engineer pilot farmer painter lawyer student writer gardener".split()

KINDS = {
    "fruit": "apple banana cherry grape lemon mango orange peach pear plum strawberry melon".split(),
    "animal": "cat dog horse cow sheep goat lion tiger bear wolf fox rabbit mouse owl duck frog".split(),
    "colour": "red blue green yellow orange purple pink brown black white grey".split(),
    "color": "red blue green yellow orange purple pink brown black white gray".split(),
    "city": CITIES,
    "vegetable": "carrot potato tomato onion pea bean cabbage spinach pepper cucumber".split(),
    "bird": "robin sparrow owl eagle hawk duck goose swan parrot crow".split(),
    "tool": "hammer saw drill wrench shovel rake axe knife brush ladder".split(),
    "instrument": "piano guitar violin flute drum trumpet harp cello organ banjo".split(),
    "planet": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "sport": "football tennis chess swimming running rowing cycling golf hockey boxing".split(),
    "flower": "rose tulip daisy lily poppy violet orchid sunflower iris".split(),
    "country": "France Italy Spain Germany Japan Brazil Canada Egypt India Norway Kenya Peru".split(),
    "drink": "water tea coffee milk juice cocoa lemonade".split(),
    "name": NAMES[:30],
}
PLURALS = {"city": "cities", "country": "countries"}

THING_COLORS = {
    "sky": "blue", "grass": "green", "sun": "yellow", "snow": "white", "coal": "black", "blood": "red",
    "banana": "yellow", "lemon": "yellow", "cherry": "red", "strawberry": "red", "carrot": "orange",
    "pumpkin": "orange", "milk": "white", "chocolate": "brown", "sea": "blue", "leaf": "green", "frog": "green",
    "crow": "black", "swan": "white", "fire truck": "red", "elephant": "grey", "mouse": "grey", "flamingo": "pink",
    "tomato": "red", "cucumber": "green", "plum": "purple", "night": "black", "cloud": "white", "rose": "red",
}  # fmt: skip
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar", "frog": "ribbit",
    "horse": "neigh", "pig": "oink", "bee": "buzz", "owl": "hoot", "mouse": "squeak", "snake": "hiss",
    "rooster": "cock-a-doodle-doo", "wolf": "howl", "bird": "tweet",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "happy": "sad", "fast": "slow",
    "light": "dark", "old": "new", "rich": "poor", "good": "bad", "high": "low", "open": "closed", "full": "empty",
    "hard": "soft", "wet": "dry", "long": "short", "strong": "weak", "early": "late", "loud": "quiet",
    "near": "far", "clean": "dirty", "easy": "difficult", "inside": "outside", "true": "false", "begin": "end",
    "love": "hate", "win": "lose", "push": "pull", "black": "white", "tall": "short", "thick": "thin",
    "yes": "no", "in": "out", "before": "after", "always": "never", "front": "back", "young": "old",
}  # fmt: skip
RHYMES = (
    "cat hat bat mat rat", "light night bright sight kite", "day play say way grey", "tree sea bee key free",
    "moon soon spoon tune June", "star car far jar", "house mouse blouse", "ring sing king spring wing",
    "cold gold old told bold", "rain train plane chain lane", "book cook look hook", "blue true new shoe two",
    "sky fly high by cry", "ball tall wall small fall", "snow go slow grow show", "cake lake make take snake",
    "heart art start part", "dream stream team cream", "fun sun run one done", "stone alone phone bone",
    "bear chair hair care pear", "fish dish wish", "page cage stage age", "store more door four floor",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London",
    "Austria": "Vienna", "Norway": "Oslo", "Portugal": "Lisbon", "Ireland": "Dublin", "Greece": "Athens",
    "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "India": "New Delhi", "Canada": "Ottawa",
    "China": "Beijing", "Russia": "Moscow", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Hungary": "Budapest", "Kenya": "Nairobi", "Brazil": "Brasilia", "Mexico": "Mexico City",
    "Australia": "Canberra", "Belgium": "Brussels", "Cuba": "Havana", "Turkey": "Ankara", "Switzerland": "Bern",
    "South Korea": "Seoul", "the Netherlands": "Amsterdam", "the United States": "Washington",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

SPELLABLE = (
    "banana apple orange hello world computer house garden river mountain window table chair school friend "
    "summer winter kitchen library machine elephant dragon castle forest island bridge pencil butter cheese yellow "
    "purple silver planet rocket engine cache page memory token model python string letter number question answer "
    "coffee teacher doctor morning evening music dance flower tree bird horse tiger monkey rabbit water fire "
    "earth wind cloud thunder star moon happy little quick brown jumps lazy beautiful wonderful strange quiet"
).split()

HEROES = (
    "dragon robot fox wizard knight princess cat dog pirate bear mouse sailor girl boy king queen owl turtle witch "
    "astronaut baker farmer ghost giant wolf rabbit horse inventor gardener unicorn penguin frog painter detective"
).split()
HERO_NAMES = "Pip Mira Bruno Luna Otto Finn Ruby Hazel Milo Nell Tilda Rufus Willow Basil Juno Edda Kai Sunny".split()
TRAITS = "brave curious shy clever lonely cheerful sleepy gentle stubborn hungry tiny patient clumsy kind".split()
PLACES = (
    "a quiet village by the sea|a castle on a hill|the middle of a dark forest|an old lighthouse|a town of glass|"
    "a cave behind a waterfall|a small island|a city of bridges|the edge of the desert|a snowy valley|"
    "a library with a thousand doors|a garden on the moon|a house made of books|a ship that never landed"
).split("|")
TREASURES = (
    "a silver key|a golden map|a broken clock|a glowing stone|an empty book|a blue feather|a box with no lid|"
    "a bell that made no sound|a paper boat|a lost letter|a tiny lantern|a red umbrella|a seed as big as a fist"
).split("|")
