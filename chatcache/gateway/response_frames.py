"""OpenAI's Responses events, built from reply events; no sockets here.

created, in_progress                     at once
output_item.added, content_part.added    all candidates in index order, with the first token
output_text.delta ...                    as they come
output_text.done, content_part.done, output_item.done      per candidate
completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import Raw

from chatcache.chat.conversations import output_item
from chatcache.chat.events import ReplyBeams, ReplyDelta, ReplyDone, ReplyFinished, ReplyStarted
from chatcache.chat.ids import new_id
from chatcache.chat.service import is_ranked, num_candidates
from chatcache.chat.tree import CANCELLED, COMPLETED, FAILED, IN_PROGRESS, INCOMPLETE, Item, Turn, Usage
from chatcache.errors import ChatcacheError
from chatcache.gateway.jsonio import encoded
from chatcache.gateway.logprobs import chat_logprobs
from chatcache.gateway.response_log import ResponseLog
from chatcache.gateway.response_object import output_items, output_text, response_object, why_incomplete
from chatcache.text.tokenizer import Tokenizer
from chatcache.types import FINISH_STOP, Params, TokenLogprob


class ResponseFrames:
    """Writes one response into its log."""

    def __init__(self, log: ResponseLog, turn: Turn, tokenizer: Tokenizer, params: Params) -> None:
        self._log = log
        self._is_ranked = is_ranked(params)
        self._turn = turn
        self._tokenizer = tokenizer
        self.item_ids = tuple(new_id("msg") for _ in range(num_candidates(params)))
        self._logprobs: list[list[object]] = [[] for _ in self.item_ids]
        self._whole_logprobs: dict[int, Raw] = {}
        self._outputs: dict[int, Item] = {}
        self._scores: dict[int, float] = {}
        self._begun = False
        self._steered = False

    @property
    def outputs(self) -> tuple[Item, ...]:
        """The finished candidates, by index."""
        return tuple(self._outputs[index] for index in sorted(self._outputs))

    @property
    def _finish_reasons(self) -> set[str | None]:
        return {item.finish_reason for item in self._outputs.values()}

    def created(self) -> None:
        response = self._response(IN_PROGRESS)
        self._log.append("response.created", response=response)
        self._log.append("response.in_progress", response=response)
        self._progress("queued", None, None)

    def started(self, event: ReplyStarted) -> None:
        self._progress("decode", event.num_prompt_tokens, event.num_cached_tokens)

    def delta(self, event: ReplyDelta) -> None:
        if not self._begun:
            self._begin()
        logprobs: list[object] = []
        if event.logprobs:
            logprobs = self._wire_logprobs(event.token_ids, event.logprobs)
            self._logprobs[event.index] += logprobs
        if event.text or logprobs:
            self._log.append("response.output_text.delta", **self._at(event.index), delta=event.text, logprobs=logprobs)

    def beams(self, event: ReplyBeams) -> None:
        nodes = [{"id": n.id, "parent": n.parent, "text": n.text, "score": round(n.score, 4)} for n in event.nodes]
        self._log.note("response.beam", response_id=self._turn.id, nodes=nodes, live=event.live)

    def done(self, event: ReplyDone) -> None:
        self._begin()
        self._outputs[event.index] = output_item(self._turn, self.item_ids[event.index], event, time.time())
        if self._is_ranked:
            self._scores[event.index] = event.score
        logprobs = self._whole_logprobs[event.index] = encoded(self._logprobs[event.index])
        at, part = self._at(event.index), output_text(event.text, logprobs)
        self._log.append("response.output_text.done", **at, text=event.text, logprobs=logprobs)
        self._log.append("response.content_part.done", **at, part=part)
        for item in self._items(event.index):
            self._log.append("response.output_item.done", output_index=event.index, item=item)

    def steered(self) -> Turn:
        """It ends because input for a successor came; the turn as it is to be stored."""
        self._steered = True
        self._turn = replace(self._turn, echo={**self._turn.echo, "incomplete_details": {"reason": "steered"}})
        return self._turn

    def status(self, event: ReplyFinished) -> str:
        """How the response ended, once all candidates are done."""
        if event.cancelled:
            return INCOMPLETE if self._steered else CANCELLED
        return COMPLETED if self._finish_reasons <= {FINISH_STOP} else INCOMPLETE

    def finished(self, event: ReplyFinished, receipt: Mapping[str, object] | None) -> None:
        """Write the terminal frame; `receipt` belongs to a cancelled response."""
        status = self.status(event)
        usage = Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)
        kind = "response.completed" if status == COMPLETED else "response.incomplete"
        more = {"receipt": receipt} if receipt is not None else {}
        self._log.append(kind, response=self._response(status, usage), **more)

    def failed(self, error: ChatcacheError) -> Turn:
        """Write the terminal frame; the turn as it is to be stored."""
        self._turn = replace(
            self._turn, echo={**self._turn.echo, "error": {"code": error.code, "message": error.message}}
        )
        self._log.append("response.failed", response=self._response(FAILED))
        return self._turn

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        for index, item_id in enumerate(self.item_ids):
            item = {"id": item_id, "type": "message", "role": "assistant", "status": IN_PROGRESS, "content": []}
            self._log.append("response.output_item.added", output_index=index, item=item)
            self._log.append("response.content_part.added", **self._at(index), part=output_text("", []))

    def _progress(self, phase: str, input_tokens: int | None, cached_tokens: int | None) -> None:
        self._log.note(
            "response.progress",
            response_id=self._turn.id,
            phase=phase,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
        )

    def _wire_logprobs(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> list[object]:
        return chat_logprobs(self._tokenizer, ids, logprobs) if logprobs else []

    def _at(self, index: int) -> dict[str, object]:
        return {"item_id": self.item_ids[index], "output_index": index, "content_index": 0}

    def _output(self) -> list[dict[str, object]]:
        return [each for index in sorted(self._outputs) for each in self._items(index)]

    def _items(self, index: int) -> tuple[dict[str, object], ...]:
        return output_items(self._outputs[index], self._whole_logprobs[index], self._scores.get(index))

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        turn = replace(self._turn, status=status, usage=usage)
        return response_object(turn, self._output(), why_incomplete(turn, self.outputs))
