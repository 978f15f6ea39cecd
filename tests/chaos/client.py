"""A client that sends turn after turn by all transports and records the results in the history."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.event_sources import SOURCES, Lost, RefusedError, Source
from tests.chaos.history import History
from tests.chaos.http_client import Answer, ask
from tests.chaos.stream_reader import Leave, Watch, watch
from tests.chaos.tagged_text import length_of, user_message

MAX_PATH = 5
MAX_KEPT = 6
SETTLE_TIMEOUT_S = 120.0
PASSING = (429, 503)
# Error codes of a gateway without the event log of a response (or without it any more); the response itself exists.
GONE = ("stream_expired", "not_found")


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply that can be continued."""

    response: str
    conversation: str
    tags: tuple[str, ...]


@dataclass(slots=True)
class Turn:
    """One turn to send. `manner`: what the client does while the reply is generated."""

    op: str
    tags: tuple[str, ...]
    words: int
    n: int
    transport: str
    manner: str
    body: dict[str, Any]
    response: str = ""
    conversation: str = ""
    is_bold: bool = False  # it may be refused: the reply that it continues may be incomplete
    seen: int = -1  # number of the newest frame
    ended: str = ""  # final status, once received


@dataclass
class Client:
    """A client of the gateways at `ports`, which share a store. Belongs to one event loop."""

    number: int
    ports: Sequence[int]
    history: History
    draw: random.Random
    stop: asyncio.Event
    replies: list[StoredReply] = field(default_factory=list)
    tags_in: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by conversation
    num_sent: int = 0

    async def run(self) -> None:
        """Send turns until the stop event is set; finish the turn in progress."""
        while not self.stop.is_set():
            await self.once()
            await asyncio.sleep(self.draw.uniform(0, 0.2))

    async def once(self) -> None:
        """Send one turn; sometimes delete something afterwards."""
        turn = self.next_turn()
        await self.send(turn)
        if turn.response and self.draw.random() < 0.08:
            await self._delete(turn)

    async def send(self, turn: Turn) -> None:
        """Send a turn and follow it to its end, also after disconnects."""
        if turn.manner == "twice":
            await asyncio.gather(self._send(turn), self._send(turn))
        else:
            await self._send(turn)
        if not turn.response:
            return
        if not turn.ended:
            await self._settle(turn)
        if turn.ended == "completed":
            self.replies = [*self.replies, StoredReply(turn.response, turn.conversation, turn.tags)][-MAX_KEPT:]

    def next_turn(self) -> Turn:
        """Draw the next turn of this client."""
        draw = self.draw
        base = draw.choice(self.replies) if self.replies and draw.random() < 0.65 else None
        if base is not None and len(base.tags) >= MAX_PATH:
            base = None
        manner = draw.choices(
            ("stay", "fin", "rst", "stall", "cancel", "fork", "twice", "leave"), (8, 3, 3, 2, 2, 2, 2, 1)
        )[0]
        return self.turn(base, draw.randrange(1, 9), draw.choice((1, 1, 1, 2, 3)), manner)

    def turn(self, base: StoredReply | None, words: int, n: int, manner: str) -> Turn:
        """Return a turn after `base`, or in a new conversation."""
        self.num_sent += 1
        tag = f"c{self.number}t{self.num_sent}"
        transport = self.draw.choice(("sse", "sse", "ws", "ws", "plain"))
        body: dict[str, Any] = {"input": user_message(tag, words), "n": n, "temperature": 1}
        body["max_output_tokens"] = length_of(tag, words) + 8
        if base is not None:
            body["previous_response_id"] = base.response
        return Turn(tag, (*(base.tags if base else ()), tag), words, n, transport, manner, body)

    def as_request(self, port: int) -> bytes:
        """Return the bytes of a request whose answer is never read."""
        turn = self.turn(None, 8, 2, "stay")
        self.history.note("invoke", op=turn.op, key="", tags=turn.tags, words=turn.words, n=turn.n, transport="unread")
        data = json.dumps({**turn.body, "stream": True}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    # -- sending ----------------------------------------------------------------------------------------------------

    async def _send(self, turn: Turn) -> None:
        """Send until the turn is acknowledged or refused, then read as much of the stream as possible."""
        first = self.draw.randrange(len(self.ports))
        for number in range(10_000):
            port = self.ports[(first + number) % len(self.ports)]
            self.history.note(
                "invoke", op=turn.op, key=turn.op, tags=turn.tags, words=turn.words, n=turn.n, transport=turn.transport
            )
            try:
                if turn.transport == "plain":
                    await self._send_plain(turn, port)
                else:
                    source = await SOURCES[turn.transport].create(port, turn.body, turn.op)
                    await self._watch(turn, source, port, Watch(turn.op, "", -1), first=number == 0)
                return
            except RefusedError as refused:
                if refused.answer.code == "stream_expired":  # the turn was acknowledged; the answer was lost
                    turn.transport = "plain"
                    continue
                self.refused(turn, refused.answer)
                if refused.answer.status not in PASSING:
                    return
            except Lost as lost:
                self.history.note("lost", op=turn.op, why=type(lost).__name__)
                if turn.response:
                    return
            await asyncio.sleep(self.draw.uniform(0.1, 0.5))

    async def _send_plain(self, turn: Turn, port: int) -> None:
        asking = asyncio.create_task(ask(port, "POST", "/v1/responses", turn.body, turn.op))
        if turn.manner in ("fin", "rst", "leave"):  # disconnect before the answer, then send again
            await asyncio.wait([asking], timeout=self.draw.uniform(0, 0.5))
            turn.manner = "stay"
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                raise ConnectionError("left")
        answer = await asking
        if answer.status != 200:
            raise RefusedError(answer)
        self._acknowledged(turn, answer.body)
        self._ended(turn, answer.body)

    async def _watch(self, turn: Turn, source: Source, port: int, state: Watch, *, first: bool) -> None:
        """Read frames and perform the action of the turn's manner in between."""
        leave: Leave | None = None
        if first and turn.manner in ("fin", "rst", "stall", "leave"):
            leave = Leave(turn.manner, after=self.draw.randrange(1, 25), for_s=self.draw.uniform(0.5, 2.5))
        other: asyncio.Task[None] | None = None
        try:
            async for frame in watch(self.history, source, state, leave):
                if frame["type"] == "response.created":
                    self._acknowledged(turn, frame["response"])
                turn.seen = max(turn.seen, state.seen)
                if first and turn.manner in ("cancel", "fork") and other is None and state.seen > 6:
                    other = asyncio.create_task(self._meanwhile(turn, port))
                if "response" in frame and frame["type"] in ("response.completed", "response.incomplete"):
                    self._ended(turn, frame["response"], is_saved=frame.get("saved", True))
                elif frame["type"] == "response.failed":
                    self._ended(turn, frame["response"])
        finally:
            if other is not None:
                await other

    async def _meanwhile(self, turn: Turn, port: int) -> None:
        """While the reply is generated: cancel it, or continue from its incomplete text."""
        if turn.manner == "cancel":
            self.history.note("leave", op=turn.op, response=turn.response)
            try:
                await ask(port, "POST", f"/v1/responses/{turn.response}/cancel")
            except Lost as lost:
                self.history.note("lost", op=turn.op, why=f"cancel: {type(lost).__name__}")
            return
        fork = self.turn(StoredReply(turn.response, turn.conversation, turn.tags), 2, 1, "stay")
        fork.transport, fork.is_bold = "sse", True
        await self._send(fork)
        if fork.response and not fork.ended:
            await self._settle(fork)

    # -- results ----------------------------------------------------------------------------------------------------

    async def _settle(self, turn: Turn) -> None:
        """Resume the stream or poll until the final state of an acknowledged turn is known."""
        deadline_s = self.history.now_s + SETTLE_TIMEOUT_S
        can_stream = turn.transport != "plain" and turn.manner != "leave"
        number = self.draw.randrange(len(self.ports))
        while not turn.ended:
            if self.history.now_s > deadline_s:
                self.history.note("hung", op=turn.op, response=turn.response)
                return
            number += 1
            port = self.ports[number % len(self.ports)]
            try:
                if can_stream:
                    source = await SOURCES[turn.transport].resume(port, turn.response, turn.seen)
                    await self._watch(turn, source, port, Watch(turn.op, turn.response, turn.seen), first=False)
                else:
                    answer = await ask(port, "GET", f"/v1/responses/{turn.response}")
                    if answer.status != 200:
                        raise RefusedError(answer)
                    if answer.body["status"] != "in_progress":
                        self._ended(turn, answer.body)
            except RefusedError as refused:
                if can_stream and (refused.answer.code in GONE or refused.answer.status == 404):
                    can_stream = len(self.ports) > 1 and self.draw.random() < 0.5
                else:
                    self.refused(turn, refused.answer)
                    if refused.answer.status not in PASSING:
                        return
            except Lost as lost:
                self.history.note("lost", op=turn.op, why=type(lost).__name__)
            if not turn.ended:
                await asyncio.sleep(self.draw.uniform(0.1, 0.4))

    async def _delete(self, turn: Turn) -> None:
        """Delete the response or its whole conversation; repeat until the delete is acknowledged."""
        whole = self.draw.random() < 0.5
        tags = self.tags_in[turn.conversation] if whole else {turn.op}
        self.replies = [reply for reply in self.replies if not tags & set(reply.tags)]
        self._note_delete(turn, tags, whole, done=False)
        path = f"/v1/conversations/{turn.conversation}" if whole else f"/v1/responses/{turn.response}"
        for number in range(10_000):
            try:
                answer = await ask(self.ports[number % len(self.ports)], "DELETE", path)
            except Lost:
                pass
            else:
                if answer.status in (200, 404):
                    self._note_delete(turn, tags, whole, done=True)
                    return
                # A turn that another gateway has not saved yet is still in progress for this one.
                if not (turn.ended == "unsaved" and answer.code == "conversation_busy"):
                    self.refused(turn, answer)
                    if answer.status not in PASSING:
                        return
            await asyncio.sleep(0.3)

    def _note_delete(self, turn: Turn, tags: set[str], whole: bool, *, done: bool) -> None:
        conversation = turn.conversation if whole else None
        for tag in sorted(tags):
            self.history.note("delete", op=tag, conversation=conversation, response=turn.response, done=done)

    def _acknowledged(self, turn: Turn, response: dict[str, Any]) -> None:
        turn.response, turn.conversation = response["id"], response["conversation"]["id"]
        self.tags_in[turn.conversation].add(turn.op)
        self.history.note("ack", op=turn.op, response=turn.response, conversation=turn.conversation)

    def _ended(self, turn: Turn, response: dict[str, Any], *, is_saved: bool = True) -> None:
        texts = {item["id"]: item["content"][0]["text"] for item in response["output"] if item["type"] == "message"}
        saved = is_saved and response.get("saved", True)
        status = response["status"]
        if status == "in_progress":  # another gateway runs it
            return
        turn.ended = status if saved else "unsaved"
        self.history.note("ended", op=turn.op, response=turn.response, status=status, texts=texts, saved=saved)

    def refused(self, turn: Turn, answer: Answer) -> None:
        if turn.is_bold and 400 <= answer.status < 500:
            return
        self.history.note("refused", op=turn.op, status=answer.status, code=answer.code)
