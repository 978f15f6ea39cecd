"""Parsing of a candidate's output into text, reasoning and tool calls while it is generated."""

from __future__ import annotations

import copy
import hashlib
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from chatcache.conversations.replies.events import CallDelta
from chatcache.conversations.tree import ReplyParts, ToolCall, derive_id, new_id
from chatcache.tokenizer.detokenizer import IncrementalDetokenizer
from chatcache.tokenizer.reply_format import ReplyFormat, ReplyParser, decode_prompt_end
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import Functions
from chatcache.tokenizer.tool_parser import ParsedText

TAIL_TOKENS = 8  # last prompt tokens, which decide whether the first word of a reply keeps its space
MAX_CALL_ID_CHARS = 64
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ReplyContext:
    """How replies of one request are parsed.

    `functions`: callable functions (None: nothing is a call).
    """

    tokenizer: Tokenizer
    reply_format: ReplyFormat = field(default_factory=ReplyFormat)
    functions: Functions | None = None

    @cached_property
    def is_parsed(self) -> bool:
        """Whether the output can contain reasoning or calls at all."""
        return bool(self.reply_format.marks(tools=self.functions is not None))

    @cached_property
    def mark_ids(self) -> frozenset[int]:
        """Special tokens that are markup for the parser; they are hidden from clients."""
        return frozenset(
            self.tokenizer.special_ids_of(self.reply_format.marks(tools=self.functions is not None)).values()
        )

    @cached_property
    def immutables(self) -> tuple[object, ...]:
        """What parsers refer to and never change: the format and the functions, whose schemas may be large."""
        form, functions = self.reply_format, self.functions if self.functions is not None else {}
        return form, form.syntax, form.reasoning, functions, *functions.values()

    def text_stream(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """Return a detokenizer for a stored reply, which EOS and stop tokens do not end."""
        return IncrementalDetokenizer(
            self.tokenizer,
            skip_special_tokens=skip_special_tokens,
            prompt_ids_tail=tuple(prompt[-TAIL_TOKENS:]),
            stop_token_ids=(),
            visible_ids=self.mark_ids,
        )

    def new_parser(
        self, prompt: Sequence[int], call_ids: Sequence[str] = (), origin: str = "", index: int = 0
    ) -> CandidateParser:
        """Return the parser of a new candidate. `call_ids`: ids already assigned to its first calls.

        The ids of the others are functions of the request id `origin` and of the candidate's `index`; without an
        `origin` they are random.
        """
        if not self.is_parsed:
            return CandidateParser(None, 0, ())
        syntax = self.reply_format.syntax
        parser = ReplyParser(self.reply_format, decode_prompt_end(self.tokenizer, prompt), self.functions)
        return CandidateParser(parser, syntax.id_chars if syntax is not None else 0, call_ids, origin, index)


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """The newly parsed parts of an output."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def merge(self, other: ParsedDelta) -> ParsedDelta:
        """Return this delta followed by `other`."""
        if not self:
            return other
        return ParsedDelta(self.text + other.text, self.reasoning + other.reasoning, self.calls + other.calls)


class CandidateParser:
    """The parser of one candidate and its accumulated result.

    Without a reply parser everything is text.
    """

    def __init__(
        self,
        parser: ReplyParser | None,
        id_chars: int,
        call_ids: Sequence[str],
        origin: str = "",
        index: int = 0,
    ) -> None:
        self._parser = parser
        self._origin, self._index = origin or new_id("call"), index
        self._id_chars = id_chars
        self._call_ids = list(call_ids)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        each = zip(self._call_ids, self._names, self._arguments, strict=False)
        return tuple(ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in each)

    @property
    def is_thinking(self) -> bool:
        return self._parser is not None and self._parser.is_thinking

    @property
    def reasoning_finished(self) -> bool:
        """Whether no further output can be reasoning."""
        return self._parser is None or self._parser.reasoning_finished

    def parts(self, raw: str) -> ReplyParts:
        """Return the parts other than the text; `raw` is the whole output pushed so far."""
        if self._parser is None:
            return ReplyParts()
        reasoning, calls = "".join(self._reasoning), self.calls
        kept = raw if reasoning or calls or raw != self.text else ""
        return ReplyParts(reasoning, calls, kept, is_call_cut=self._parser.has_open_call)

    def push(self, text: str) -> ParsedDelta:
        if self._parser is None:
            self._texts.append(text)
            return ParsedDelta(text)
        return self._record(self._parser.push(text))

    def copy(self, shared: Iterable[object] = ()) -> CandidateParser:
        """Return an independent parser in the same state. `shared`: immutable objects that both may refer to."""
        clone = copy.copy(self)
        clone._parser = copy.deepcopy(self._parser, {id(each): each for each in shared})
        clone._call_ids, clone._names = self._call_ids.copy(), self._names.copy()
        clone._texts, clone._reasoning = self._texts.copy(), self._reasoning.copy()
        clone._arguments = [pieces.copy() for pieces in self._arguments]
        return clone

    def finish(self, end: str = "") -> ParsedDelta:
        """Return the output that was held back. `end`: the text of the token that ended the candidate, if one did."""
        return self._record(self._parser.finish(end)) if self._parser is not None else ParsedDelta()

    def _record(self, parsed: ParsedText) -> ParsedDelta:
        self._texts.append(parsed.text)
        if not (parsed.calls or parsed.reasoning):
            return ParsedDelta(parsed.text)
        if parsed.reasoning:
            self._reasoning.append(parsed.reasoning)
        deltas: list[CallDelta] = []
        for part in parsed.calls:
            if part.name:
                self._begin_call(part.name, part.call_id)
            self._arguments[part.number].append(part.arguments)
            call_id = self._call_ids[part.number] if part.name else ""
            delta = CallDelta(part.number, part.arguments, call_id, part.name)
            if deltas and deltas[-1].number == part.number:
                last = deltas.pop()
                delta = CallDelta(part.number, last.arguments + part.arguments, last.call_id, last.name)
            deltas.append(delta)
        return ParsedDelta(parsed.text, parsed.reasoning, tuple(deltas))

    def _begin_call(self, name: str, call_id: str) -> None:
        """Record a new call. `call_id`: the id that the model wrote, which is used if no other call has it."""
        self._names.append(name)
        self._arguments.append([])
        if len(self._call_ids) < len(self._names):
            is_usable = call_id and call_id not in self._call_ids and len(call_id) <= MAX_CALL_ID_CHARS
            self._call_ids.append(call_id if is_usable else self._new_id())

    def _new_id(self) -> str:
        call_id = derive_id("call", self._origin, self._index, len(self._call_ids))
        if not self._id_chars:
            return call_id
        digest = hashlib.blake2b(call_id.encode(), digest_size=self._id_chars).digest()
        return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest)
