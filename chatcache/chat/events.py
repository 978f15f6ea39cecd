"""What a reply says while it is made: text, not tokens; candidates by index."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from chatcache.chat.tree import ReplyParts
from chatcache.types.events import StartReport, TokenLogprob


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    """The first token was computed; the prompt's figures are final. `index`: which prompt, where there are several.

    `prompt_logprobs`, if asked for: one entry per prompt token, None for the first. So is `report`.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    index: int = 0
    report: StartReport | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of tool call `number` (0, 1, ... within its candidate). `call_id` and `name` come whole, with the first."""

    number: int
    arguments: str
    call_id: str = ""
    name: str = ""


class ReplyDelta(msgspec.Struct, frozen=True, gc=False):  # one per token: made four times as fast as a dataclass
    """More of candidate `index`. `text` may be empty while characters or a possible stop string are held back.

    `token_ids` and `logprobs` (one each, if asked for) are of the tokens that arrived, shown or not yet shown. Where
    the model's output is parsed, what it thinks and calls is `reasoning` and `calls`, and no part of `text`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class BeamNode:
    """A token that was once the newest of a live beam: `text` below that of `parent` (0: the prompt).

    `score`: summed log-probability of the path down to here.
    """

    id: int
    parent: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class ReplyBeams:
    """New nodes, parents first, and the ids of those where live beams end now, best first."""

    nodes: tuple[BeamNode, ...]
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """Candidate `index` is complete: `text` is all of it, `token_ids` all its tokens, the ending one included.

    `settled_ids` are the ids that stand for exactly `text`, or `parts.raw` where there is one, in a later prompt.
    `num_pages_freed`: of a candidate that was dropped, None of all others.
    """

    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...]
    settled_ids: tuple[int, ...]
    score: float = 0.0
    parts: ReplyParts = field(default_factory=ReplyParts)
    num_pages_freed: int | None = None


@dataclass(frozen=True, slots=True)
class ReplyFinished:
    """All candidates are done. `cancelled`: ended early on request; `num_pages_freed` is then part of the receipt."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    cancelled: bool = False
    num_pages_freed: int = 0
    num_reasoning_tokens: int = 0


ReplyEvent = ReplyStarted | ReplyDelta | ReplyBeams | ReplyDone | ReplyFinished
