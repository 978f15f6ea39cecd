"""Writes the events of OpenAI's Responses API into the log, from the events of a reply.

Order of the events of a response:

    created, in_progress                                    at once
    output_item.added, content_part.added                   all candidates in index order, with the first token; if
                                                            replies may hold reasoning or calls, when each item begins
    output_text.delta ...                                   as the text is generated
    output_text.done, content_part.done, output_item.done   for each candidate
    completed | incomplete | failed

Events of the output items of one candidate:

    reasoning      output_item.added, content_part.added, reasoning_text.delta ... done, content_part.done, item.done
    its summary    output_item.added, reasoning_summary_part.added, reasoning_summary_text.delta ... done, part.done,
                   item.done; instead, if the request asked for a summary
    message        output_item.added, content_part.added, output_text.delta    ... done, content_part.done, item.done
    function_call  output_item.added, function_call_arguments.delta            ... done, item.done

An item is added with its first content. A candidate without text and calls gets an empty message at its end. The
`output_index` counts the items of all candidates in the order in which they are added.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import msgspec

from chatcache.conversations.replies.events import (
    CallDelta,
    ReplyBeams,
    ReplyDelta,
    ReplyDone,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.conversations.replies.service import Candidate, Reply, is_ranked, num_candidates
from chatcache.conversations.tree import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    Item,
    ToolCall,
    Turn,
    Usage,
    derive_id,
)
from chatcache.conversations.turns import PlannedTurn, output_item
from chatcache.errors import ChatcacheError
from chatcache.gateway.api.compaction import encode_summary
from chatcache.gateway.api.logprobs import ScoredToken
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.objects import (
    SCORES,
    STATISTICS,
    call_item,
    call_item_id,
    has_summary,
    incomplete_reason,
    miss_cause,
    output_items,
    output_text,
    reasoning_id,
    reasoning_item,
    response_object,
)
from chatcache.gateway.schemas.responses import (
    Compaction,
    OutputItem,
    OutputMessage,
    ReasoningText,
    Receipt,
    Response,
    Statistics,
    SummaryText,
)
from chatcache.types.events import FINISH_CANCELLED, FINISH_LENGTH, FINISH_STOP, StartReport, is_dead_end


class _ReasoningEvents(NamedTuple):
    """Types of the events of reasoning, the field that counts its parts, and the type of a part."""

    part_added: str
    delta: str
    done: str
    part_done: str
    part_index: str
    part_type: type[ReasoningText | SummaryText]


_CONTENT = _ReasoningEvents(
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "content_index",
    ReasoningText,
)
_SUMMARY = _ReasoningEvents(
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "summary_index",
    SummaryText,
)


def _num_shared(planned: PlannedTurn) -> int | None:
    """Return how many tokens the reply has in common with the one that it continues; None if it continues none."""
    request, prefix = planned.request, planned.prefix
    if prefix is None or request.reply_start:
        return None
    return len(prefix.ids) - (request.fork_with is not None)


class CandidateEventWriter:
    """Writes the events of one candidate.

    `output_indexes` yields the next free `output_index`. `summarizes`: the reasoning is written as its summary.
    """

    def __init__(
        self, log: ResponseLog, output_indexes: Iterator[int], candidate: int, item_id: str, *, summarizes: bool
    ) -> None:
        self._log = log
        self._summarizes = summarizes
        self._reasoning_events = _SUMMARY if summarizes else _CONTENT
        self._output_indexes = output_indexes
        self._candidate = candidate
        self._item_id = item_id
        self._output_index: dict[str, int] = {}  # item id -> output_index
        self._reasoning: list[str] = []
        self._in_reasoning = False
        self._calls: list[ToolCall] = []
        self._arguments: list[str] = []

    def begin_message(self) -> None:
        """Add the message item, unless it exists."""
        if self._item_id in self._output_index:
            return
        self._add_item(OutputMessage(self._item_id, "assistant", "in_progress", [], self._candidate))
        self._log.append("response.content_part.added", **self._content_position(self._item_id), part=output_text(""))

    def delta(self, event: ReplyDelta, logprobs: Sequence[ScoredToken]) -> None:
        """Write a delta and store `logprobs`, those of its text."""
        if event.reasoning:
            self._reasoning_delta(event.reasoning)
        if event.text or logprobs:
            self._end_reasoning()
            self.begin_message()
            position = self._content_position(self._item_id)
            stored = self._log.logprobs.add(self._candidate, logprobs) if logprobs else []
            self._log.append("response.output_text.delta", **position, delta=event.text, logprobs=stored)
        for call in event.calls:
            self._end_reasoning()
            self._call_delta(call)

    def done(self, item: Item, score: float | None) -> dict[int, OutputItem]:
        """Write the events that end all output items of the candidate.

        Return the items by `output_index`.
        """
        self._end_reasoning()
        self._end_call(INCOMPLETE if item.parts.is_call_cut else COMPLETED)
        logprobs = self._log.logprobs.all_of(self._candidate)
        items = {each.id: each for each in output_items(item, logprobs, score, summarizes=self._summarizes)}
        if self._item_id in items:
            self.begin_message()
            position = self._content_position(self._item_id)
            self._log.append("response.output_text.done", **position, text=item.text, logprobs=logprobs)
            self._log.append("response.content_part.done", **position, part=output_text(item.text, logprobs))
            self._end_item(items[self._item_id])
        return {index: items[item_id] for item_id, index in self._output_index.items() if item_id in items}

    def output_indexes(self, item: Item) -> tuple[int, ...]:
        """Return the positions of the output items of the candidate; those that have not begun come last."""
        following = count(max(self._output_index.values(), default=-1) + 1)
        known = self._output_index
        return tuple(known[each.id] if each.id in known else next(following) for each in output_items(item))

    def _reasoning_delta(self, text: str) -> None:
        item_id, events = reasoning_id(self._item_id), self._reasoning_events
        if not self._in_reasoning:
            self._in_reasoning = True
            self._add_item(reasoning_item(item_id, self._candidate, None, IN_PROGRESS))
            self._log.append(events.part_added, **self._reasoning_position(), part=events.part_type(""))
        self._reasoning.append(text)
        self._log.append(events.delta, **self._reasoning_position(), delta=text)

    def _end_reasoning(self) -> None:
        if not self._in_reasoning:
            return
        self._in_reasoning = False
        item_id, text, events = reasoning_id(self._item_id), "".join(self._reasoning), self._reasoning_events
        self._log.append(events.done, **self._reasoning_position(), text=text)
        self._log.append(events.part_done, **self._reasoning_position(), part=events.part_type(text))
        self._end_item(reasoning_item(item_id, self._candidate, text, summarizes=self._summarizes))

    def _call_delta(self, delta: CallDelta) -> None:
        if delta.name:
            self._end_call(COMPLETED)
            call = ToolCall(delta.call_id, delta.name, "")
            self._calls.append(call)
            item_id = call_item_id(self._item_id, delta.number)
            self._add_item(call_item(item_id, self._candidate, call, IN_PROGRESS))
        if delta.arguments:
            self._arguments.append(delta.arguments)
            position = self._call_position(delta.number)
            self._log.append("response.function_call_arguments.delta", **position, delta=delta.arguments)

    def _end_call(self, status: str) -> None:
        if not self._calls:
            return
        number = len(self._calls) - 1
        item_id = call_item_id(self._item_id, number)
        started_call, arguments = self._calls[-1], "".join(self._arguments)
        self._arguments = []
        call = ToolCall(started_call.call_id, started_call.name, arguments)
        item = call_item(item_id, self._candidate, call, status)
        position = self._call_position(number)
        self._log.append("response.function_call_arguments.done", **position, name=item.name, arguments=arguments)
        self._end_item(item)

    def _add_item(self, item: OutputItem) -> None:
        index = self._output_index[item.id] = next(self._output_indexes)
        self._log.append("response.output_item.added", output_index=index, item=item)

    def _end_item(self, item: OutputItem) -> None:
        self._log.append("response.output_item.done", output_index=self._output_index[item.id], item=item)

    def _content_position(self, item_id: str) -> dict[str, object]:
        return {"item_id": item_id, "output_index": self._output_index[item_id], "content_index": 0}

    def _reasoning_position(self) -> dict[str, object]:
        item_id = reasoning_id(self._item_id)
        return {"item_id": item_id, "output_index": self._output_index[item_id], self._reasoning_events.part_index: 0}

    def _call_position(self, number: int) -> dict[str, object]:
        item_id = call_item_id(self._item_id, number)
        return {"item_id": item_id, "output_index": self._output_index[item_id]}


class ResponseEventWriter:
    """Writes the events of one response into its log."""

    def __init__(self, log: ResponseLog, planned: PlannedTurn, reply: Reply) -> None:
        params = reply.request.params
        self._log = log
        self._is_ranked = is_ranked(params)
        self._turn = planned.turn
        self._divergence = planned.prompt.divergence
        self.item_ids = tuple(derive_id("msg", planned.turn.id, index) for index in range(num_candidates(params)))
        self._held_logprobs: list[list[ScoredToken]] = [[] for _ in self.item_ids]  # of text that is not sent yet
        output_indexes = count()
        summarizes = has_summary(planned.turn.echo)
        self._candidates = [
            CandidateEventWriter(log, output_indexes, *each, summarizes=summarizes) for each in enumerate(self.item_ids)
        ]
        self._outputs: dict[int, Item] = {}
        self._scores: list[float | None] = [None] * len(self.item_ids)
        self._wire_outputs: dict[int, OutputItem] = {}
        self._is_parsed = reply.is_parsed
        self._has_output = False
        self._is_cut = False
        self._since_s = time.perf_counter()
        self._first_output_s: float | None = None
        self._statistics = Statistics(None, None, fork_at=_num_shared(planned))
        self._length_ends: list[bool] = []  # for each candidate that was cut off: whether by a dead end

    @property
    def outputs(self) -> tuple[Item, ...]:
        """The finished candidates, by index."""
        return tuple(self._outputs[index] for index in sorted(self._outputs))

    def current_outputs(self, candidates: Sequence[Candidate]) -> list[Item]:
        """Return those candidates that have tokens as messages: the finished ones, and the others as they are now."""
        now = time.time()
        return [
            self._outputs.get(each.index)
            or self._in_order(output_item(self._turn, self.item_ids[each.index], each.snapshot(), now))
            for each in candidates
            if each.index in self._outputs or each.num_tokens
        ]

    @property
    def _finish_reasons(self) -> set[str | None]:
        """Finish reasons of the candidates that were not dropped."""
        return {item.finish_reason for item in self._outputs.values()} - {FINISH_CANCELLED}

    def created(self) -> None:
        response = self._response(IN_PROGRESS)
        self._log.append("response.created", response=response)
        self._log.append("response.in_progress", response=response)
        self._progress("queued", None, None)

    def started(self, event: ReplyStarted) -> None:
        extra = self._report_fields(event.report) if event.report is not None else {}
        for name, value in extra.items():
            setattr(self._statistics, name, value)
        self._progress("decode", event.num_prompt_tokens, event.num_cached_tokens, **extra)

    def delta(self, event: ReplyDelta) -> None:
        if not self._has_output:
            self._begin_output()
            self._first_output_s = time.perf_counter()
        logprobs = self._logprobs_of_text(event) if event.logprobs else ()
        self._candidates[event.index].delta(event, logprobs)

    def beams(self, event: ReplyBeams) -> None:
        nodes = [{"id": n.id, "parent": n.parent, "text": n.text, "score": round(n.score, 4)} for n in event.nodes]
        self._log.append_unnumbered("response.beam", response_id=self._turn.id, nodes=nodes, live=event.live)

    def done(self, event: ReplyDone) -> None:
        self._begin_output()
        if event.finish_reason == FINISH_LENGTH:
            self._length_ends.append(is_dead_end(event.finish_reason, event.stop_reason))
        item = output_item(self._turn, self.item_ids[event.index], event, time.time())
        score = event.score if self._is_ranked else None
        if score is not None:
            self._scores[event.index] = score
        self._wire_outputs |= self._candidates[event.index].done(item, score)
        self._outputs[event.index] = self._in_order(item)

    @property
    def ended_in_dead_ends(self) -> bool:
        """Whether dead ends, and no limit of tokens, cut candidates off."""
        return bool(self._length_ends) and all(self._length_ends)

    def mark_incomplete(self, reason: str) -> Turn:
        """Record why the response ends early without being cancelled; return the turn to store."""
        self._is_cut = True
        self._turn = replace(self._turn, echo={**self._turn.echo, "incomplete_details": {"reason": reason}})
        return self._turn

    def record_statistics(self, receipt: Receipt | None) -> Turn:
        """Add the figures of the response, which ends now, to the turn; return the turn to store."""
        figures = self._statistics
        if self._first_output_s is not None:
            figures.first_token_ms = round((self._first_output_s - self._since_s) * 1000, 1)
            figures.decode_ms = round((time.perf_counter() - self._first_output_s) * 1000, 1)
        figures.receipt = receipt
        echo = {**self._turn.echo, STATISTICS: msgspec.to_builtins(figures)}
        if self._is_ranked:
            echo[SCORES] = self._scores
        self._turn = replace(self._turn, echo=echo)
        return self._turn

    def status(self, event: ReplyFinished) -> str:
        """Return the final status, once all candidates are done."""
        if event.cancelled:
            return INCOMPLETE if self._is_cut else CANCELLED
        return COMPLETED if self._finish_reasons <= {FINISH_STOP} else INCOMPLETE

    def finished(self, event: ReplyFinished, receipt: Receipt | None, *, is_saved: bool) -> None:
        """Write the terminal frame of a response that did not fail.

        `receipt`: what a cancel has cost, None unless the response was cancelled. `is_saved`: False while the store has
        not accepted the result.
        """
        status = self.status(event)
        kind = "response.completed" if status == COMPLETED else "response.incomplete"
        extra: dict[str, object] = {"statistics": self._statistics}
        if receipt is not None:
            extra["receipt"] = receipt
        if not is_saved:
            extra["saved"] = False
        self._log.append(kind, response=self._response(status, to_usage(event)), **extra)

    def failed(self, error: ChatcacheError) -> Turn:
        """Write the terminal frame of a failure; return the turn to store."""
        self._turn = replace(
            self._turn, echo={**self._turn.echo, "error": {"code": error.code, "message": error.message}}
        )
        self._log.append("response.failed", response=self._response(FAILED))
        return self._turn

    def _in_order(self, item: Item) -> Item:
        """Record the positions of a candidate's output items, unless they are those of `ReplyParts`' order."""
        indexes = self._candidates[item.index].output_indexes(item) if self._is_parsed else ()
        if len(self._candidates) == 1 and indexes == tuple(range(len(indexes))):
            return item
        return replace(item, parts=msgspec.structs.replace(item.parts, output_indexes=indexes))

    def _begin_output(self) -> None:
        if not self._has_output and not self._is_parsed:
            for candidate in self._candidates:
                candidate.begin_message()
        self._has_output = True

    def _progress(self, phase: str, input_tokens: int | None, cached_tokens: int | None, **extra: object) -> None:
        self._log.append_unnumbered(
            "response.progress",
            response_id=self._turn.id,
            phase=phase,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            **extra,
        )

    def _report_fields(self, report: StartReport) -> dict[str, object]:
        miss = report.miss
        if miss is None:
            return {"copied_pages": report.num_copied_pages, "miss": None}
        cause = miss_cause(miss.reason, miss.at_token, miss.detail, self._divergence, miss.page_size)
        return {"copied_pages": report.num_copied_pages, "miss": cause}

    def _logprobs_of_text(self, event: ReplyDelta) -> Sequence[ScoredToken]:
        """Return the log-probabilities to send with a delta.

        Those of tokens whose text is held back are kept until the text is sent.
        """
        held = self._held_logprobs[event.index]
        held.extend(zip(event.token_ids, event.logprobs, strict=True))
        if self._is_parsed and not event.text:
            if event.reasoning or event.calls:
                held.clear()
            return ()
        self._held_logprobs[event.index] = []
        return held

    def _output(self) -> list[OutputItem]:
        return [self._wire_outputs[index] for index in sorted(self._wire_outputs)]

    def _response(self, status: str, usage: Usage | None = None) -> Response:
        turn = replace(self._turn, status=status, usage=usage)
        return response_object(turn, self._output(), incomplete_reason(turn, self.outputs))


class CompactionEventWriter(ResponseEventWriter):
    """Writes the events of a compaction: the reply is a summary, sent as one item at its end.

    A summary that was cut at its limit counts as complete.
    """

    def delta(self, event: ReplyDelta) -> None:
        """Ignore a delta: the summary is sent as a whole."""

    def done(self, event: ReplyDone) -> None:
        self._outputs[event.index] = output_item(self._turn, self.item_ids[event.index], event, time.time())
        item = Compaction(derive_id("cmp", self._turn.id, event.index), encode_summary(event.text))
        self._wire_outputs[event.index] = item
        for kind in ("response.output_item.added", "response.output_item.done"):
            self._log.append(kind, output_index=event.index, item=item)

    def status(self, event: ReplyFinished) -> str:
        return super().status(event) if event.cancelled else COMPLETED


def to_usage(event: ReplyFinished) -> Usage:
    return Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens, event.num_reasoning_tokens)
