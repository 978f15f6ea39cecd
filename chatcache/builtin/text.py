# ruff: noqa: SIM905  (word lists read better as text)
"""Turn templates into wording: the small accidents of case, punctuation and politeness that users bring."""

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
    """Hold one question and its answer.

    `brief` is the answer of a terse assistant, `plain` forbids restyling of the words, and `becomes` names the style
    of the assistant from this answer on.
    """

    user: str
    answer: str
    brief: str = ""
    plain: bool = False
    becomes: str = ""


def held_out(kind: str, value: object) -> bool:
    """Say whether a value belongs to the held-out tenth that training never sees."""
    digest = hashlib.sha256(f"{kind}:{str(value).lower()}".encode()).digest()
    return digest[0] * 256 + digest[1] < 65536 // ONE_IN_HELD_OUT


def invent(rng: Random, kind: str, *, held: bool = False) -> str:
    """Return an invented capitalised word from the training side (or the held-out side) of `kind`."""
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
    """Fill a lower-case template and vary everything around its slots; slot values stay as they are."""
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
    """Choose one of the `|`-separated answers; answers are always cleanly written."""
    return rng.choice(templates.split("|")).format(**slots)
