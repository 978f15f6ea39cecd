"""One candidate's output items as OpenAI's events: what it thinks, what it says, what it calls.

reasoning      output_item.added, content_part.added, reasoning_text.delta ... done, content_part.done, output_item.done
message        output_item.added, content_part.added, output_text.delta    ... done, content_part.done, output_item.done
function_call  output_item.added, function_call_arguments.delta            ... done, output_item.done

An item is added with the first that is of it; a message also at the end, where there is neither text nor call. Items of
all candidates are numbered as they come.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Raw

from chatcache.chat.events import CallDelta, ReplyDelta
from chatcache.chat.tree import COMPLETED, IN_PROGRESS, Item, ToolCall
from chatcache.gateway.logprobs import list_of
from chatcache.gateway.response_log import ResponseLog
from chatcache.gateway.response_object import (
    call_item,
    call_item_id,
    output_items,
    output_text,
    reasoning_id,
    reasoning_item,
    reasoning_text,
)


class CandidateFrames:
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
        item = {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": IN_PROGRESS,
            "candidate": self._candidate,
            "content": [],
        }
        self._add(item)
        self._log.append("response.content_part.added", **self._place(self._item_id), part=output_text("", []))

    def delta(self, event: ReplyDelta, logprobs: bytes) -> None:
        """`logprobs`: of its text, as `encoded_logprobs` returns them."""
        if event.reasoning:
            self._think(event.reasoning)
        if event.text or logprobs:
            self._end_thought()
            self.begin_message()
            at = self._place(self._item_id)
            self._log.append("response.output_text.delta", **at, delta=event.text, logprobs=list_of(logprobs))
        for call in event.calls:
            self._end_thought()
            self._call(call)

    def done(self, item: Item, logprobs: Raw, score: float | None) -> dict[int, dict[str, object]]:
        """End all items; return them as they are in the response, by `output_index`."""
        self._end_thought()
        self._end_call(item.status)
        whole = {str(each["id"]): each for each in output_items(item, logprobs, score)}
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
            self._log.append("response.content_part.added", **self._place(item_id), part=reasoning_text(""))
        self._thoughts.append(text)
        self._log.append("response.reasoning_text.delta", **self._place(item_id), delta=text)

    def _end_thought(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        item_id, text = reasoning_id(self._item_id), "".join(self._thoughts)
        self._log.append("response.reasoning_text.done", **self._place(item_id), text=text)
        self._log.append("response.content_part.done", **self._place(item_id), part=reasoning_text(text))
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

    def _add(self, item: dict[str, object]) -> None:
        index = self._at[str(item["id"])] = next(self._numbers)
        self._log.append("response.output_item.added", output_index=index, item=item)

    def _end(self, item: dict[str, object]) -> None:
        self._log.append("response.output_item.done", output_index=self._at[str(item["id"])], item=item)

    def _place(self, item_id: str) -> dict[str, object]:
        return {"item_id": item_id, "output_index": self._at[item_id], "content_index": 0}

    def _call_place(self, number: int) -> dict[str, object]:
        item_id = call_item_id(self._item_id, number)
        return {"item_id": item_id, "output_index": self._at[item_id]}
