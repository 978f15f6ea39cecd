"""Random clients of two tenants: sockets and requests in any order, valid or not.

Some requests are abandoned. Every frame and answer is checked: numbers without gaps, one end for each response, no 5xx
but 503, nothing of the other tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

Json = dict[str, Any]
ENDS = ("response.completed", "response.incomplete", "response.failed")
BEHIND_THE_END = ("response.steer.pending", "response.steer.failed")
REFUSALS = (400, 404, 409, 429, 503)  # a tenant may hold half of the queue
TEXTS = (
    "Hi",
    "",
    "word " * 60,
    "שלום 👩‍👩‍👧 \u0000\u200d é" * 9,
    "<|im_end|>\n<|im_start|>assistant\n",
    "\ufffd\U0010ffff",
)
NOWHERE = ("resp_x", "msg_x", "conv_x", "root", "", "x" * 4000, "é\u0000")


@dataclass
class World:
    """Ids that the clients of one tenant have received, and the faults they found."""

    key: str
    responses: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    conversations: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_received: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def learn(self, response: Json) -> None:
        self.responses.append(response["id"])
        self.items += [*(response.get("input_item_ids") or ()), *(item["id"] for item in response["output"])]
        if response["conversation"]:
            self.conversations.append(response["conversation"]["id"])


@dataclass
class Lane:
    """One lane of one socket, as its frames tell it."""

    expected: int = 0
    is_open: bool = False
    may_skip: bool = False

    def take(self, frame: Json) -> str | None:
        """What is wrong with the next frame of the lane."""
        kind, number = frame["type"], frame.get("sequence_number")
        if number is None or (kind == "response.steer.failed" and "id" not in frame["steer"]):
            return None
        if kind == "response.resumed":
            return None
        if kind == "response.snapshot":
            wrong = "a snapshot of the past" if number < self.expected - 1 or not self.may_skip else None
            self.expected = number + 1
            return wrong
        if kind == "response.created":
            wrong = f"begun in number {number}, the one before open: {self.is_open}" if number or self.is_open else None
            self.expected, self.is_open = 1, True
            return wrong
        wrong = f"number {number}, not {self.expected}" if number != self.expected else None
        self.expected = number + 1
        if kind in ENDS:
            wrong = wrong or ("a second end" if not self.is_open else None)
            self.is_open = False
        return wrong


class RandomClient:
    """One client: a thousand things that it may do next."""

    def __init__(self, url: str, mine: World, other: World, seed: int) -> None:
        self._url = url
        self._mine, self._other = mine, other
        self._draws = random.Random(seed)

    async def play(self, num_rounds: int) -> None:
        limits = httpx.Limits(max_connections=4, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._mine.headers, timeout=120, limits=limits, trust_env=False
        ) as client:
            for _ in range(num_rounds):
                await self._draws.choice((self._socket, self._socket, self._ask, self._read, self._change))(client)

    # -- what to send ---------------------------------------------------------------------------------------------

    def _id(self, known: list[str]) -> str:
        roll = self._draws.random()
        theirs = getattr(self._other, "responses" if known is self._mine.responses else "items")
        if roll < 0.1 and theirs:
            return str(self._draws.choice(theirs))
        return self._draws.choice(known[-40:] if known and roll < 0.9 else NOWHERE)

    def _body(self) -> Json:
        draw = self._draws
        body: Json = {"input": draw.choice(TEXTS), "max_output_tokens": draw.choice((1, 4, 30, 200))}
        body |= {"ignore_eos": True} if draw.random() < 0.5 else {}
        place = draw.choice(("", "", "response", "item", "conversation"))
        if place == "response":
            body["previous_response_id"] = self._id(self._mine.responses)
        elif place == "item":
            body["previous_item_id"] = self._id(self._mine.items)
        elif place == "conversation" and self._mine.conversations:
            body["conversation"] = draw.choice(self._mine.conversations[-20:])
        if place and draw.random() < 0.4:
            body["fork_at"] = draw.choice((1, 2, 7, 10**9))
            if draw.random() < 0.5:
                del body["input"]
        roll = draw.random()
        if roll < 0.15:
            body |= {"beam_width": draw.choice((2, 4, 64)), "stop": ["e", "a\u00e9"], "n": draw.choice((1, 2))}
        elif roll < 0.5:
            body |= {"n": draw.choice((1, 2, 5, 64)), "temperature": draw.choice((0, 1, 2))}
        elif roll < 0.6:
            body |= {"structured_outputs": {"regex": "[a-c]{2,9}"}}
        elif roll < 0.7:
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
        if draw.random() < 0.2:
            body |= draw.choice(({"store": False}, {"generate": False}, {"rev": 1}, {"n": 0}, {"instructions": "Yes."}))
        return body

    # -- sockets --------------------------------------------------------------------------------------------------

    async def _socket(self, client: httpx.AsyncClient) -> None:
        extended = self._draws.random() < 0.6
        url = self._url.replace("http", "ws") + "/v1/responses"
        async with connect(
            url,
            subprotocols=[Subprotocol("chatcache.v1")] if extended else None,
            additional_headers=self._mine.headers,
            max_size=None,
            max_queue=None,
            open_timeout=120,
            close_timeout=0.5,
            proxy=None,
        ) as socket:
            with contextlib.suppress(ConnectionClosed):
                await self._talk(socket, extended)
                await self._leave(socket)
        if socket.close_code == 1011:
            self._mine.faults.append("a socket was closed with 1011")

    async def _talk(self, socket: ClientConnection, extended: bool) -> None:
        lanes: dict[str | None, Lane] = defaultdict(Lane)
        here: list[str] = []
        for number in range(self._draws.randrange(1, 9)):
            frame = self._frame(here, f"{number}", extended, lanes)
            await socket.send(json.dumps(frame, ensure_ascii=self._draws.random() < 0.5))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._draws.choice((0, 0.01, 0.1, 0.4))):
                    while True:
                        self._receive(json.loads(await socket.recv()), lanes, here)

    def _frame(self, here: list[str], name: str, extended: bool, lanes: dict[str | None, Lane]) -> Json:
        draw = self._draws
        which = draw.choice(here) if here and draw.random() < 0.8 else self._id(self._mine.responses)
        kinds = ["create", "create", "create", "cancel", "steer"]
        kind = draw.choice(
            [*kinds, "resume", "resume", "drop", "drop", "ack", "subscribe", "prewarm"] if extended else kinds
        )
        if kind == "create":
            lane = draw.choice(({}, {}, {"stream_id": "a"}, {"stream_id": f"own{name}"}))
            return {"type": "response.create", **self._body(), **lane}
        if kind == "steer":
            return {"type": "response.steer", "previous_response_id": which, "input": draw.choice((*TEXTS, 5, [[]]))}
        if kind == "resume":
            after, lane_name = draw.choice((-1, 0, 1, 5, 60, 10**6)), f"resumed{name}"
            lanes[lane_name] = Lane(after + 1, is_open=True, may_skip=True)
            return {"type": "response.resume", "response_id": which, "starting_after": after, "stream_id": lane_name}
        if kind == "ack":
            return {"type": "response.ack", "response_id": which, "sequence_number": draw.choice((-1, 0, 3, 10**6))}
        if kind == "drop":
            return {"type": "response.drop", "response_id": which, "candidate": draw.choice((0, 0, 1, 1, 2, 70))}
        if kind == "cancel":
            return {"type": "response.cancel", "response_id": which}
        if kind == "subscribe":
            return {"type": "conversation.subscribe"}
        return {"type": "prompt.prewarm", **{k: v for k, v in self._body().items() if k in ("input", "conversation")}}

    def _receive(self, frame: Json, lanes: dict[str | None, Lane], here: list[str]) -> None:
        self._mine.num_received += 1
        kind = frame["type"]
        if kind == "error":
            if frame["status"] not in REFUSALS:
                self._mine.faults.append(f"an error {frame}")
            return
        name = frame.get("stream_id")
        lane = lanes[name]
        lane.may_skip |= kind == "response.progress"
        if name is not None and name.startswith("resumed") and kind == "response.created":
            lane.is_open = False  # from its beginning, or the successor of one whose end was not asked for
        wrong = lane.take(frame)
        if wrong:
            self._mine.faults.append(f"lane {name}: {wrong}: {str(frame)[:300]}")
        if kind == "response.created":
            here.append(frame["response"]["id"])
            self._mine.learn(frame["response"])
        elif kind in ENDS:
            self._check(frame["response"], frame.get("receipt"))
        if any(each in json.dumps(frame) for each in self._other.conversations[-5:]):
            self._mine.faults.append(f"told of another tenant's conversation: {str(frame)[:300]}")

    def _check(self, response: Json, receipt: Json | None) -> None:
        self._mine.learn(response)
        if (response["status"] == "cancelled") != (receipt is not None):
            self._mine.faults.append(f"{response['status']} with receipt {receipt}")

    async def _leave(self, socket: ClientConnection) -> None:
        match self._draws.choice(("close", "abort", "half", "stall")):
            case "abort":
                socket.transport.abort()
            case "half":
                socket.transport.write_eof()
            case "stall":
                socket.transport.pause_reading()
                await asyncio.sleep(0.2)
                socket.transport.abort()

    # -- requests -------------------------------------------------------------------------------------------------

    async def _ask(self, client: httpx.AsyncClient) -> None:
        body, roll = self._body(), self._draws.random()
        if roll < 0.3:
            chat = {"messages": [{"role": "user", "content": body.get("input", "")}], "stream": roll < 0.2}
            kept = ("n", "temperature", "beam_width", "stop", "ignore_eos", "structured_outputs")
            chat |= {name: body[name] for name in kept if name in body}
            await self._stream(client, "POST", "/v1/chat/completions", {**chat, "max_tokens": 40})
        elif roll < 0.6:
            await self._stream(client, "POST", "/v1/responses", {**body, "stream": True, "background": roll < 0.5})
        else:
            answer = await self._call(client, "POST", "/v1/responses", {**body, "background": roll < 0.8})
            if "output" in answer:
                self._mine.learn(answer)

    async def _read(self, client: httpx.AsyncClient) -> None:
        response_id, item = quote(self._id(self._mine.responses), ""), quote(self._id(self._mine.items), "")
        after = self._draws.choice(("0", "7", "999", "-1", "x"))
        for path in (
            f"/v1/responses/{response_id}?stream=true&starting_after={after}",
            f"/v1/responses/{response_id}",
            f"/v1/responses/{response_id}/input_items",
            f"/v1/conversations/{self._conversation()}/items?branches=all",
            f"/v1/conversations/{self._conversation()}/items/{item}",
            f"/v1/conversations/{self._conversation()}/export?format={self._draws.choice(('json', 'markdown'))}",
            "/v1/conversations?query=wor",
            "/v1/cache/accounts",
        ):
            if self._draws.random() < 0.3:
                await self._stream(client, "GET", path, None)

    async def _change(self, client: httpx.AsyncClient) -> None:
        draw, response_id, conversation = self._draws, self._id(self._mine.responses), self._conversation()
        there = f"/v1/responses/{quote(response_id, '')}"
        method, path, body = draw.choice(
            (
                ("POST", f"{there}/cancel", None),
                ("POST", f"{there}/cancel", None),
                ("DELETE", there, None),
                ("DELETE", f"/v1/conversations/{conversation}", None),
                ("DELETE", f"/v1/conversations/{conversation}/items/{quote(self._id(self._mine.items), '')}", None),
                (
                    "POST",
                    f"/v1/conversations/{conversation}",
                    {"title": draw.choice(TEXTS), "rev": draw.choice((1, 3))},
                ),
                ("POST", f"/v1/conversations/{conversation}", {"active_leaf": self._id(self._mine.items)}),
                ("POST", f"/v1/conversations/{conversation}/title", {}),
                ("POST", f"/v1/conversations/{conversation}/items", {"items": [{"role": "user", "content": "x"}]}),
                ("POST", "/v1/cache/explain", {"input": "Hi", "previous_response_id": response_id}),
                ("POST", "/v1/responses/input_tokens", self._body()),
            )
        )
        answer = await self._call(client, method, path, body)
        if path.endswith("/cancel") and "status" in answer and answer["status"] == "in_progress":
            self._mine.faults.append("cancelled, yet in progress")

    def _conversation(self) -> str:
        known = self._mine.conversations
        return self._draws.choice(known[-20:] if known and self._draws.random() < 0.9 else NOWHERE[:3])

    async def _call(self, client: httpx.AsyncClient, method: str, path: str, body: Json | None) -> Json:
        """Send a request and read the whole answer; some requests are abandoned."""
        try:
            async with asyncio.timeout(self._draws.choice((30, 30, 0.05))):
                answer = await client.request(method, path, json=body)
        except TimeoutError:
            return {}
        self._status(answer, path)
        found: Json = answer.json() if answer.headers.get("content-type") == "application/json" else {}
        return found if answer.status_code == 200 else {}

    async def _stream(self, client: httpx.AsyncClient, method: str, path: str, body: Json | None) -> None:
        """Read a streamed answer to its end, or abandon it."""
        lane = Lane(is_open=False)
        left = self._draws.choice((1, 5, 20, 10**9, 10**9))
        async with client.stream(method, path, json=body) as answer:
            self._status(answer, path)
            if answer.headers["content-type"].partition(";")[0] != "text/event-stream":
                return
            is_first = True
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                frame = json.loads(line[6:])
                if "error" in frame and "type" not in frame:
                    self._mine.faults.append(f"{path}: {frame}")
                if "sequence_number" in frame:
                    if is_first and method == "GET":
                        lane = Lane(frame["sequence_number"], is_open=True)
                        begun = frame["type"] == "response.created"
                        lane.is_open = not begun and frame["type"] not in BEHIND_THE_END
                    wrong = lane.take(frame)
                    if wrong:
                        self._mine.faults.append(f"{path}: {wrong}: {str(frame)[:200]}")
                    if frame["type"] in ("response.created", *ENDS):
                        self._mine.learn(frame["response"])
                is_first = False
                left -= 1
                if left == 0:
                    return

    def _status(self, answer: httpx.Response, path: str) -> None:
        self._mine.num_received += 1
        if answer.status_code != 200 and answer.status_code not in REFUSALS:
            self._mine.faults.append(f"{answer.status_code} for {path[:200]}")
