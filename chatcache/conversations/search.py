"""Search queries and matching, independent of how a store indexes text.

A query is words separated by spaces; a text matches if it contains all of them. `don't` or `你好` are several words
that must be adjacent. The last word may be a prefix. Case, accents and compatibility forms are ignored.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from chatcache.conversations.tree import Conversation
from chatcache.errors import InvalidRequestError

MAX_COMPARED_MESSAGES = 8  # newest matching messages of a conversation, of which a search shows the best
MAX_QUERY_CHARS = 4096  # fits a URL in any percent encoding
_MAX_WORD_CHARS = 64  # longer words are truncated
_SNIPPET_CHARS = 200
_BEFORE_MARK_CHARS = 40
_ELLIPSIS = "…"

# Scripts without spaces between words: every character is a word. Emoji are words as well.
_SINGLE_CHAR_WORDS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff\u2600-\u27bf\U0001f000-\U0001faff"
)
# Vowel signs and other combining marks belong to the word that contains them; planes that have any.
_MARK_PLANES = ((0x300, 0x2000), (0x3099, 0x309B), (0xA000, 0xAC00), (0x10A00, 0x12000))
_MARKS = "".join(
    chr(code) for start, end in _MARK_PLANES for code in range(start, end) if unicodedata.category(chr(code))[0] == "M"
)
_WORD = re.compile(f"[{_SINGLE_CHAR_WORDS}]|(?:[^\\W_{_SINGLE_CHAR_WORDS}]|[{_MARKS}])+")
_ASCII_WORD = re.compile("[a-z0-9]+")  # equal to _WORD for ASCII text, and much faster
_ACCENTS = re.compile("[\u0300-\u036f]+")


class Word(NamedTuple):
    """A word and its position in the text, folded: without differences of case and accents."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of a text and the ranges of the found words.

    (start, end) in characters, in order, disjoint.
    """

    text: str
    marks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A conversation that a query found.

    The message fields are None where only the title matched.
    """

    conversation: Conversation
    item_id: str | None
    role: str | None
    snippet: Snippet | None
    title_marks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TextMatch:
    """How a text matches. `is_whole`: the last word matched a whole word and not only a prefix."""

    marks: tuple[tuple[int, int], ...]
    is_whole: bool

    @property
    def score(self) -> tuple[bool, int]:
        """The sort key of a match: greater is better."""
        return self.is_whole, len(self.marks)


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """Phrases that a text must all contain; the last word of the last phrase may be a prefix."""

    phrases: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> SearchQuery:
        """Parse any text; characters that form no word are ignored.

        Raises: InvalidRequestError for a text of more than `MAX_QUERY_CHARS`."""
        if len(text) > MAX_QUERY_CHARS:
            raise InvalidRequestError(f"query may have at most {MAX_QUERY_CHARS} characters", param="query")
        phrases = [tuple(word.text for word in iter_words(part)) for part in text.split()]
        kept = [phrase for phrase in phrases if phrase]
        return cls((*dict.fromkeys(kept[:-1]), *kept[-1:]))

    def find(self, text: str) -> TextMatch | None:
        """Return where `text` contains the words, or None unless it has them all.

        A query without words finds nothing.
        """
        if not self.phrases:
            return None
        found = tuple(iter_words(text))
        starts: dict[str, list[int]] = {}
        for at, word in enumerate(found):
            starts.setdefault(word.text, []).append(at)
        marked: set[int] = set()
        for phrase in self.phrases[:-1]:
            starts_of_phrase = [at for at in starts.get(phrase[0], ()) if _phrase_at(found, at, phrase)]
            if not starts_of_phrase:
                return None
            marked |= {at + k for at in starts_of_phrase for k in range(len(phrase))}
        *before, last = self.phrases[-1]
        candidates = starts.get(before[0], []) if before else range(len(found))
        ends = [
            at + len(before)
            for at in candidates
            if at + len(before) < len(found)
            and found[at + len(before)].text.startswith(last)
            and _phrase_at(found, at, tuple(before))
        ]
        if not ends:
            return None
        marked |= {end - k for end in ends for k in range(len(before) + 1)}
        is_whole = any(found[end].text == last for end in ends)
        return TextMatch(tuple((found[at].start, found[at].end) for at in sorted(marked)), is_whole)


def iter_words(text: str) -> Iterator[Word]:
    """Yield the words of a text, folded (see `Word`), with their positions."""
    for match in _WORD.finditer(text):
        folded = _fold(match.group())
        if folded:
            yield Word(folded, match.start(), match.end())


def fold_words(text: str) -> str:
    """Return the folded words of a text, separated by single spaces: the content of an index."""
    if not text.isascii():
        return " ".join(word.text for word in iter_words(text))
    found = _ASCII_WORD.findall(text.lower())
    return " ".join(found if len(max(found, key=len, default="")) <= _MAX_WORD_CHARS else _truncated(found))


def make_snippet(text: str, marks: tuple[tuple[int, int], ...]) -> Snippet:
    """Return the surroundings of the first mark, cut between words if possible."""
    start = max(0, marks[0][0] - _BEFORE_MARK_CHARS)
    if start:
        space = re.compile(r"\s").search(text, start, marks[0][0])
        start = space.end() if space is not None else start
    end = min(len(text), start + _SNIPPET_CHARS)
    if end < len(text):
        space_at = max(text.rfind(each, marks[0][1], end) for each in (" ", "\n"))
        end = space_at if space_at > 0 else end
    lead = _ELLIPSIS if start else ""
    shift = len(lead) - start
    inside = tuple((first + shift, min(last, end) + shift) for first, last in marks if first < end)
    return Snippet(lead + text[start:end] + (_ELLIPSIS if end < len(text) else ""), inside)


class MessageMatch(NamedTuple):
    """The message of a conversation that a query found."""

    item_id: str
    role: str
    text: str
    found: TextMatch


def best_message(items: Iterable[tuple[str, str, str]], query: SearchQuery) -> MessageMatch | None:
    """Return the best match among the newest messages that match, or None.

    `items`: (id, role, text) of messages, newest first.
    """
    best: MessageMatch | None = None
    num_matching = 0
    for item_id, role, text in items:
        found = query.find(text)
        if found is None:
            continue
        num_matching += 1
        if best is None or found.score > best.found.score:
            best = MessageMatch(item_id, role, text, found)
        if num_matching == MAX_COMPARED_MESSAGES:
            break
    return best


def make_hit(head: Conversation, query: SearchQuery, best: MessageMatch | None) -> SearchHit:
    """Return the hit of a found conversation, by its title alone if `best` is None."""
    title = query.find(head.title)
    title_marks = title.marks if title is not None else ()
    if best is None:
        return SearchHit(head, None, None, None, title_marks)
    return SearchHit(head, best.item_id, best.role, make_snippet(best.text, best.found.marks), title_marks)


def _truncated(found: list[str]) -> list[str]:
    return [word[:_MAX_WORD_CHARS] for word in found]


def _phrase_at(found: tuple[Word, ...], at: int, phrase: tuple[str, ...]) -> bool:
    return len(found) >= at + len(phrase) and all(found[at + k].text == word for k, word in enumerate(phrase))


def _fold(word: str) -> str:
    if word.isascii():
        return word[:_MAX_WORD_CHARS].lower()
    plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", word[:_MAX_WORD_CHARS])).casefold()
    if plain.isalnum():
        return plain[:_MAX_WORD_CHARS]
    return "".join(filter(_is_word_char, plain))[:_MAX_WORD_CHARS]


def _is_word_char(char: str) -> bool:
    """Check whether a character belongs to a word after compatibility forms were replaced.

    Letters, digits, and marks and symbols outside ASCII do; the dot of "1." or the slash of "1/2" do not.
    """
    return char.isalnum() or (not char.isascii() and unicodedata.category(char)[0] in "MS")
