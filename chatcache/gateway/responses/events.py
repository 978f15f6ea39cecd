"""OpenAI's Responses events, built from reply events; no sockets here.

created, in_progress                     at once
output_item.added, content_part.added    all candidates in index order, with the first token; where replies may hold
                                         more than text (`candidate_frames`), each item when it begins
output_text.delta ...                    as they come
output_text.done, content_part.done, output_item.done      per candidate
completed | incomplete | failed

One candidate's output items as OpenAI's events: what it thinks, what it says, what it calls.

reasoning      output_item.added, content_part.added, reasoning_text.delta ... done, content_part.done, output_item.done
message        output_item.added, content_part.added, output_text.delta    ... done, content_part.done, output_item.done
function_call  output_item.added, function_call_arguments.delta            ... done, output_item.done

An item is added with the first that is of it; a message also at the end, where there is neither text nor call. Items of
all candidates are numbered as they come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from chatcache.conversations.replies.events import (
    CallDelta,
    ReplyBeams,
    ReplyDelta,
    ReplyDone,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.conversations.replies.service import Reply, is_ranked, num_candidates
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
    new_id,
)
from chatcache.conversations.turns import PlannedTurn, output_item
from chatcache.errors import ChatcacheError
from chatcache.gateway.api.logprobs import EncodedLogprobs, encoded_list, encoded_logprobs
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.objects import (
    call_item,
    call_item_id,
    incomplete_reason,
    miss_cause,
    output_items,
    output_text,
    reasoning_id,
    reasoning_item,
    response_object,
)
from chatcache.gateway.schemas.completions import TokenLogprob
from chatcache.gateway.schemas.responses import OutputItem, OutputMessage, ReasoningText, Receipt, Response
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import FINISH_CANCELLED, FINISH_STOP, StartReport


class CandidateEventWriter:
    """`numbers` yields the `output_index` of the next item of the response."""

    def __init__(self, log: ResponseLog, numbers: Iterator[int], candidate: int, item_id: str) -> None:
        self._log = log
        self._numbers = numbers
        self._candidate = candidate
        self._item_id = item_id
        self._at: dict[str, int] = {}  # item id -> output_index
        self._thoughts: list[str] = []
        self._is_thinking = False
        self._calls: list[ToolCall] = []
        self._arguments: list[str] = []

    def begin_message(self) -> None:
        """Add the message, if it is not there yet."""
        if self._item_id in self._at:
            return
        self._add(OutputMessage(self._item_id, "assistant", "in_progress", [], self._candidate))
        self._log.append("response.content_part.added", **self._place(self._item_id), part=output_text(""))

    def delta(self, event: ReplyDelta, logprobs: bytes) -> None:
        """`logprobs`: of its text, as `encoded_logprobs` returns them."""
        if event.reasoning:
            self._think(event.reasoning)
        if event.text or logprobs:
            self._end_thought()
            self.begin_message()
            at = self._place(self._item_id)
            self._log.append("response.output_text.delta", **at, delta=event.text, logprobs=encoded_list(logprobs))
        for call in event.calls:
            self._end_thought()
            self._call(call)

    def done(self, item: Item, logprobs: list[TokenLogprob], score: float | None) -> dict[int, OutputItem]:
        """End all items; return them as they are in the response, by `output_index`."""
        self._end_thought()
        self._end_call(item.status)
        whole = {each.id: each for each in output_items(item, logprobs, score)}
        if self._item_id in whole:
            self.begin_message()
            at = self._place(self._item_id)
            self._log.append("response.output_text.done", **at, text=item.text, logprobs=logprobs)
            self._log.append("response.content_part.done", **at, part=output_text(item.text, logprobs))
            self._end(whole[self._item_id])
        return {index: whole[item_id] for item_id, index in self._at.items() if item_id in whole}

    def _think(self, text: str) -> None:
        item_id = reasoning_id(self._item_id)
        if not self._is_thinking:
            self._is_thinking = True
            self._add(reasoning_item(item_id, self._candidate, None, IN_PROGRESS))
            self._log.append("response.content_part.added", **self._place(item_id), part=ReasoningText(""))
        self._thoughts.append(text)
        self._log.append("response.reasoning_text.delta", **self._place(item_id), delta=text)

    def _end_thought(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        item_id, text = reasoning_id(self._item_id), "".join(self._thoughts)
        self._log.append("response.reasoning_text.done", **self._place(item_id), text=text)
        self._log.append("response.content_part.done", **self._place(item_id), part=ReasoningText(text))
        self._end(reasoning_item(item_id, self._candidate, text))

    def _call(self, delta: CallDelta) -> None:
        if delta.name:
            self._end_call(COMPLETED)
            call = ToolCall(delta.call_id, delta.name, "")
            self._calls.append(call)
            item_id = call_item_id(self._item_id, delta.number)
            self._add(call_item(item_id, self._candidate, call, IN_PROGRESS))
        if delta.arguments:
            self._arguments.append(delta.arguments)
            at = self._call_place(delta.number)
            self._log.append("response.function_call_arguments.delta", **at, delta=delta.arguments)

    def _end_call(self, status: str) -> None:
        if not self._calls:
            return
        number = len(self._calls) - 1
        item_id = call_item_id(self._item_id, number)
        begun, arguments = self._calls[-1], "".join(self._arguments)
        self._arguments = []
        call = ToolCall(begun.call_id, begun.name, arguments)
        at = self._call_place(number)
        self._log.append("response.function_call_arguments.done", **at, name=call.name, arguments=arguments)
        self._end(call_item(item_id, self._candidate, call, status))

    def _add(self, item: OutputItem) -> None:
        index = self._at[item.id] = next(self._numbers)
        self._log.append("response.output_item.added", output_index=index, item=item)

    def _end(self, item: OutputItem) -> None:
        self._log.append("response.output_item.done", output_index=self._at[item.id], item=item)

    def _place(self, item_id: str) -> dict[str, object]:
        return {"item_id": item_id, "output_index": self._at[item_id], "content_index": 0}

    def _call_place(self, number: int) -> dict[str, object]:
        item_id = call_item_id(self._item_id, number)
        return {"item_id": item_id, "output_index": self._at[item_id]}


class ResponseEventWriter:
    """Writes one response into its log."""

    def __init__(self, log: ResponseLog, planned: PlannedTurn, tokenizer: Tokenizer, reply: Reply) -> None:
        params = reply.request.params
        self._log = log
        self._is_ranked = is_ranked(params)
        self._turn = planned.turn
        self._divergence = planned.prompt.divergence
        self._tokenizer = tokenizer
        self.item_ids = tuple(new_id("msg") for _ in range(num_candidates(params)))
        self._logprobs = [EncodedLogprobs() for _ in self.item_ids]
        self._early = [EncodedLogprobs() for _ in self.item_ids]  # log-probabilities of text that is held back
        numbers = count()
        self._candidates = [CandidateEventWriter(log, numbers, *each) for each in enumerate(self.item_ids)]
        self._outputs: dict[int, Item] = {}
        self._wire_outputs: dict[int, OutputItem] = {}
        self._is_read = reply.is_parsed
        self._begun = False
        self._cut = False

    @property
    def outputs(self) -> tuple[Item, ...]:
        """The finished candidates, by index."""
        return tuple(self._outputs[index] for index in sorted(self._outputs))

    @property
    def _finish_reasons(self) -> set[str | None]:
        """Of the candidates that were not dropped."""
        return {item.finish_reason for item in self._outputs.values()} - {FINISH_CANCELLED}

    def created(self) -> None:
        response = self._response(IN_PROGRESS)
        self._log.append("response.created", response=response)
        self._log.append("response.in_progress", response=response)
        self._progress("queued", None, None)

    def started(self, event: ReplyStarted) -> None:
        more = self._report_fields(event.report) if event.report is not None else {}
        self._progress("decode", event.num_prompt_tokens, event.num_cached_tokens, **more)

    def delta(self, event: ReplyDelta) -> None:
        if not self._begun:
            self._begin()
        logprobs = self._logprobs_of_text(event) if event.logprobs else b""
        self._candidates[event.index].delta(event, logprobs)

    def beams(self, event: ReplyBeams) -> None:
        nodes = [{"id": n.id, "parent": n.parent, "text": n.text, "score": round(n.score, 4)} for n in event.nodes]
        self._log.append_unnumbered("response.beam", response_id=self._turn.id, nodes=nodes, live=event.live)

    def done(self, event: ReplyDone) -> None:
        self._begin()
        item = self._outputs[event.index] = output_item(self._turn, self.item_ids[event.index], event, time.time())
        logprobs = self._logprobs[event.index].as_list()
        score = event.score if self._is_ranked else None
        self._wire_outputs |= self._candidates[event.index].done(item, logprobs, score)

    def mark_incomplete(self, reason: str) -> Turn:
        """It ends early, and not because somebody cancelled it; the turn as it is to be stored."""
        self._cut = True
        self._turn = replace(self._turn, echo={**self._turn.echo, "incomplete_details": {"reason": reason}})
        return self._turn

    def status(self, event: ReplyFinished) -> str:
        """How the response ended, once all candidates are done."""
        if event.cancelled:
            return INCOMPLETE if self._cut else CANCELLED
        return COMPLETED if self._finish_reasons <= {FINISH_STOP} else INCOMPLETE

    def finished(self, event: ReplyFinished, receipt: Receipt | None, *, is_saved: bool) -> None:
        """Write the terminal frame; `receipt` belongs to a cancelled response."""
        status = self.status(event)
        kind = "response.completed" if status == COMPLETED else "response.incomplete"
        more: dict[str, object] = {"receipt": receipt} if receipt is not None else {}
        if not is_saved:
            more["saved"] = False
        self._log.append(kind, response=self._response(status, to_usage(event)), **more)

    def failed(self, error: ChatcacheError) -> Turn:
        """Write the terminal frame; the turn as it is to be stored."""
        self._turn = replace(
            self._turn, echo={**self._turn.echo, "error": {"code": error.code, "message": error.message}}
        )
        self._log.append("response.failed", response=self._response(FAILED))
        return self._turn

    def _begin(self) -> None:
        if not self._begun and not self._is_read:
            for candidate in self._candidates:
                candidate.begin_message()
        self._begun = True

    def _progress(self, phase: str, input_tokens: int | None, cached_tokens: int | None, **more: object) -> None:
        self._log.append_unnumbered(
            "response.progress",
            response_id=self._turn.id,
            phase=phase,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            **more,
        )

    def _report_fields(self, report: StartReport) -> dict[str, object]:
        miss = report.miss
        if miss is None:
            return {"copied_pages": report.num_copied_pages, "miss": None}
        cause = miss_cause(miss.reason, miss.at_token, miss.detail, self._divergence, miss.page_size)
        return {"copied_pages": report.num_copied_pages, "miss": cause}

    def _logprobs_of_text(self, event: ReplyDelta) -> bytes:
        """The log-probabilities to show with an event: those of text, and of tokens that may yet become some."""
        early = self._early[event.index]
        early.extend(encoded_logprobs(self._tokenizer, event.token_ids, event.logprobs))
        if self._is_read and not event.text:
            if event.reasoning or event.calls:
                early.pop_all()
            return b""
        logprobs = early.pop_all()
        self._logprobs[event.index].extend(logprobs)
        return logprobs

    def _output(self) -> list[OutputItem]:
        return [self._wire_outputs[index] for index in sorted(self._wire_outputs)]

    def _response(self, status: str, usage: Usage | None = None) -> Response:
        turn = replace(self._turn, status=status, usage=usage)
        return response_object(turn, self._output(), incomplete_reason(turn, self.outputs))


def to_usage(event: ReplyFinished) -> Usage:
    return Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens, event.num_reasoning_tokens)
