"""OpenAI's Responses events, built from reply events; no sockets here.

created, in_progress                     at once
output_item.added, content_part.added    all candidates in index order, with the first token; where replies may hold
                                         more than text (`candidate_frames`), each item when it begins
output_text.delta ...                    as they come
output_text.done, content_part.done, output_item.done      per candidate
completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from chatcache.chat.conversations import PlannedTurn
from chatcache.chat.events import ReplyBeams, ReplyDelta, ReplyDone, ReplyFinished, ReplyStarted
from chatcache.chat.ids import new_id
from chatcache.chat.items import output_item
from chatcache.chat.service import Reply, is_ranked, num_candidates
from chatcache.chat.tree import CANCELLED, COMPLETED, FAILED, IN_PROGRESS, INCOMPLETE, Item, Turn, Usage
from chatcache.errors import ChatcacheError
from chatcache.gateway.candidate_frames import CandidateFrames
from chatcache.gateway.logprobs import EncodedLogprobs, encoded_logprobs
from chatcache.gateway.misses import miss_json
from chatcache.gateway.response_log import ResponseLog
from chatcache.gateway.response_object import response_object, why_incomplete
from chatcache.text.tokenizer import Tokenizer
from chatcache.types.events import FINISH_CANCELLED, FINISH_STOP, StartReport


class ResponseFrames:
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
        self._candidates = [CandidateFrames(log, numbers, *each) for each in enumerate(self.item_ids)]
        self._outputs: dict[int, Item] = {}
        self._wire_outputs: dict[int, dict[str, object]] = {}
        self._is_read = reply.is_read
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
        more = self._report_json(event.report) if event.report is not None else {}
        self._progress("decode", event.num_prompt_tokens, event.num_cached_tokens, **more)

    def delta(self, event: ReplyDelta) -> None:
        if not self._begun:
            self._begin()
        logprobs = self._logprobs_of_text(event) if event.logprobs else b""
        self._candidates[event.index].delta(event, logprobs)

    def beams(self, event: ReplyBeams) -> None:
        nodes = [{"id": n.id, "parent": n.parent, "text": n.text, "score": round(n.score, 4)} for n in event.nodes]
        self._log.note("response.beam", response_id=self._turn.id, nodes=nodes, live=event.live)

    def done(self, event: ReplyDone) -> None:
        self._begin()
        item = self._outputs[event.index] = output_item(self._turn, self.item_ids[event.index], event, time.time())
        logprobs = self._logprobs[event.index].as_list()
        score = event.score if self._is_ranked else None
        self._wire_outputs |= self._candidates[event.index].done(item, logprobs, score)

    def cut(self, reason: str) -> Turn:
        """It ends early, and not because somebody cancelled it; the turn as it is to be stored."""
        self._cut = True
        self._turn = replace(self._turn, echo={**self._turn.echo, "incomplete_details": {"reason": reason}})
        return self._turn

    def status(self, event: ReplyFinished) -> str:
        """How the response ended, once all candidates are done."""
        if event.cancelled:
            return INCOMPLETE if self._cut else CANCELLED
        return COMPLETED if self._finish_reasons <= {FINISH_STOP} else INCOMPLETE

    def finished(self, event: ReplyFinished, receipt: Mapping[str, object] | None, *, is_saved: bool) -> None:
        """Write the terminal frame; `receipt` belongs to a cancelled response."""
        status = self.status(event)
        kind = "response.completed" if status == COMPLETED else "response.incomplete"
        more: dict[str, object] = {"receipt": receipt} if receipt is not None else {}
        if not is_saved:
            more["saved"] = False
        self._log.append(kind, response=self._response(status, usage_of(event)), **more)

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
        self._log.note(
            "response.progress",
            response_id=self._turn.id,
            phase=phase,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            **more,
        )

    def _report_json(self, report: StartReport) -> dict[str, object]:
        miss = report.miss
        if miss is None:
            return {"copied_pages": report.num_copied_pages, "miss": None}
        why = miss_json(miss.reason, miss.at_token, miss.detail, self._divergence, miss.page_size)
        return {"copied_pages": report.num_copied_pages, "miss": why}

    def _logprobs_of_text(self, event: ReplyDelta) -> bytes:
        """The log-probabilities to show with an event: those of text, and of tokens that may yet become some."""
        early = self._early[event.index]
        early.extend(encoded_logprobs(self._tokenizer, event.token_ids, event.logprobs))
        if self._is_read and not event.text:
            if event.reasoning or event.calls:
                early.take()
            return b""
        logprobs = early.take()
        self._logprobs[event.index].extend(logprobs)
        return logprobs

    def _output(self) -> list[dict[str, object]]:
        return [self._wire_outputs[index] for index in sorted(self._wire_outputs)]

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        turn = replace(self._turn, status=status, usage=usage)
        return response_object(turn, self._output(), why_incomplete(turn, self.outputs))


def usage_of(event: ReplyFinished) -> Usage:
    return Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens, event.num_reasoning_tokens)
