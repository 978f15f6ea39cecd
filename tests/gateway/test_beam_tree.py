"""The beam tree: a reader that missed events ends with the same tree as any other."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.gateway.responses import event_log as response_log
from chatcache.gateway.responses.event_log import BeamTree, LogReader, ResponseLog
from chatcache.gateway.schemas.responses import OutputMessage
from tests.gateway.frames import Frame, receive, send, until_end
from tests.gateway.serving import Server, hurry, slowed
from tests.gateway.test_resume import lasting, numbered, tab, until

Node = dict[str, Any]


class Growth:
    """Beams that grow and end at random; `lines` is the expected text of each live beam."""

    def __init__(self, seed: int, width: int) -> None:
        self._draws = random.Random(seed)
        self._width = width
        self._last_id = 0
        self.lines: dict[int, str] = {0: ""}

    def grow(self, num_steps: int = 1) -> tuple[list[Node], list[int]]:
        nodes: list[Node] = []
        for _ in range(num_steps):
            lines: dict[int, str] = {}
            for _ in range(self._width):
                parent = self._draws.choice(list(self.lines))
                self._last_id += 1
                text = self._draws.choice("ab é")
                nodes.append({"id": self._last_id, "parent": parent, "text": text, "score": -1.0})
                lines[self._last_id] = self.lines[parent] + text
            self.lines = lines
        return nodes, list(self.lines)


class Page:
    """The state of a client that shows the beams."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {0: ""}
        self.live: list[int] = []

    def take(self, frame: Frame) -> None:
        if frame["type"] != "response.beam":
            return
        if frame.get("whole"):
            self.texts = {0: ""}
        for node in frame["nodes"]:
            assert node["id"] not in self.texts, "a node is told once"
            self.texts[node["id"]] = self.texts[node["parent"]] + node["text"]
        self.live = frame["live"]

    @property
    def lines(self) -> dict[int, str]:
        return {node: self.texts[node] for node in self.live}


@given(seed=st.integers(0, 10**6), width=st.integers(1, 5), joins=st.lists(st.integers(1, 4), max_size=40))
def test_beam_tree_holds_exactly_the_paths_to_live_beams(seed: int, width: int, joins: list[int]) -> None:
    growth, tree = Growth(seed, width), BeamTree()
    assert tree.frame("r") is None and tree.num_bytes == 0
    parents: dict[int, int] = {}
    for num_steps in joins:
        nodes, live = growth.grow(num_steps)
        tree.update(nodes, live)
        parents |= {node["id"]: node["parent"] for node in nodes}
        data = tree.frame("r")
        assert data is not None
        whole = json.loads(data)
        page = Page()
        page.take(whole)
        assert page.lines == growth.lines
        needed: set[int] = set()
        for node in live:
            while node and node not in needed:
                needed.add(node)
                node = parents[node]
        assert {node["id"] for node in whole["nodes"]} == needed and tree.num_bytes > 0
    tree.update([], [])
    assert tree.frame("r") is None and tree.num_bytes == 0


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_log_reader_late_or_lagging_receives_the_live_beams(seed: int, data: st.DataObject) -> None:
    async def work() -> None:
        log, growth, draws = ResponseLog("resp_1"), Growth(seed, 3), random.Random(seed)
        log.append("response.created", response={})
        item = OutputMessage("msg_0", "assistant", "in_progress", [])
        log.append("response.output_item.added", output_index=0, item=item)
        readers: list[tuple[LogReader, Page]] = [(log.reader(extended=True), Page())]
        for _ in range(data.draw(st.integers(1, 12))):
            for _ in range(draws.choice([1, 5, 60, 150, 300])):
                nodes, live = growth.grow(draws.randrange(1, 3))
                log.append_unnumbered("response.beam", response_id="resp_1", nodes=nodes, live=live)
                if draws.random() < 0.3:
                    log.append("response.output_text.delta", item_id="msg_0", output_index=0, delta="x")
            readers.append((log.reader(draws.randrange(-1, log.last_number + 1), extended=True), Page()))
            for reader, page in readers:
                if draws.random() < 0.5:
                    caught_up(log, reader, page)
                    assert page.lines == growth.lines
        log.append("response.completed", response={})
        log.close()
        for reader, page in readers:
            assert caught_up(log, reader, page) == "response.completed" and page.lines == growth.lines
        plain = [frame.number async for frame in log.reader()]
        assert plain == list(range(log.last_number + 1))

    asyncio.run(work())


def caught_up(log: ResponseLog, reader: LogReader, page: Page) -> str:
    """Read all available frames; return the kind of the last one."""
    kind = ""
    while reader._needs_beams or reader._position < log._frames.num_frames:
        for frame in reader._pop_frames():
            page.take(json.loads(frame.data))
            kind = frame.kind
    return kind


def test_snapshot_reports_finished_candidates() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        log.append("response.created", response={})
        for index in (0, 1):
            item = OutputMessage(f"msg_{index}", "assistant", "in_progress", [], index)
            log.append("response.output_item.added", output_index=index, item=item)
        ended = OutputMessage("msg_1", "assistant", "completed", [], 1, finish_reason="stop", score=-2.5)
        log.append("response.output_item.done", output_index=1, item=ended)
        for _ in range(response_log.MAX_LAG_FRAMES + 1):
            log.append("response.output_text.delta", item_id="msg_0", output_index=0, delta="x")
        frames = await log.reader(extended=True).next()
        first, second = json.loads(frames[-1].data)["outputs"]
        assert (first["status"], first["candidate"]) == ("in_progress", 0) and "finish_reason" not in first
        assert (second["status"], second["finish_reason"], second["score"]) == ("completed", "stop", -2.5)

    asyncio.run(work())


BEAMS: Frame = {
    "input": "Hello", "max_output_tokens": 400, "ignore_eos": True, "beam_width": 4, "n": 2, "stream_beams": True,
    "skip_special_tokens": False,
}  # fmt: skip


@pytest.mark.slow
def test_websocket_resume_sends_the_beam_tree_again(server: Server, url: str) -> None:
    """Resume a running response from the start or from a number.

    The tree equals that of an uninterrupted reader.
    """
    with slowed(server, 0.02), tab(url) as staying:
        with tab(url) as page:
            send(page, **BEAMS)
            started = until(page, "response.beam")
            response_id = next(frame for frame in started if frame["type"] == "response.created")["response"]["id"]
            send(staying, "response.resume", response_id=response_id)
            for _ in range(20):
                receive(page)
        with tab(url) as page:
            send(page, "conversation.subscribe")
            subscribed = until(page, "conversation.subscribed")[-1]
            assert [run["response_id"] for run in subscribed["running"]] == [response_id]
            send(page, "response.resume", response_id=response_id)
            assert "response.created" in [frame["type"] for frame in until(page, "response.beam")]
        hurry(server)
        with tab(url) as page:
            send(page, "response.resume", response_id=response_id, starting_after=1)
            frames = until_end(page)
        whole = until_end(staying)
    beams = [frame for frame in frames if frame["type"] == "response.beam"]
    assert beams[0]["whole"] is True and not any(frame.get("whole") for frame in beams[1:])
    kept = [frame for frame in whole if frame["type"] == "response.beam"]
    assert not any(frame.get("whole") for frame in kept), "who missed nothing is told nothing twice"
    assert tree_of(frames).lines == tree_of(whole).lines
    assert frames[-1] == whole[-1] and len(whole[-1]["response"]["output"]) == 2


@pytest.mark.slow
def test_websocket_lagging_reader_gets_beams_with_the_snapshot(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tab(url) as page:
        send(page, **BEAMS)
        sent = until_end(page)
    response_id = next(frame for frame in sent if frame["type"] == "response.created")["response"]["id"]
    monkeypatch.setattr(response_log, "MAX_LAG_FRAMES", 3)
    with tab(url) as late:
        send(late, "response.resume", response_id=response_id)
        frames = until_end(late)
    kinds = [frame["type"] for frame in frames]
    assert kinds.count("response.snapshot") == 1
    assert kinds.index("response.beam") == kinds.index("response.snapshot") - 1
    assert tree_of(frames).lines == tree_of(sent).lines != {}


def tree_of(frames: list[Frame]) -> Page:
    page = Page()
    for frame in frames:
        page.take(frame)
    return page


def test_websocket_resume_sends_every_candidate_again(server: Server, url: str) -> None:
    """Every candidate, finished ones included, is sent exactly once with its index."""
    with slowed(server, 0.1), lasting(server):
        with tab(url) as page:
            send(page, input="Hello", n=4, max_output_tokens=50, seed=5)  # one of them ends after four tokens
            until(page, "response.output_item.done")
        with tab(url) as page:
            send(page, "conversation.subscribe")
            (running,) = until(page, "conversation.subscribed")[-1]["running"]
            send(page, "response.resume", response_id=running["response_id"])
            frames = [receive(page)]
            hurry(server)
            frames = until_end(page, frames[0])
    response = frames[-1]["response"]
    assert running["conversation_id"] == response["conversation"]["id"]
    said: dict[str, str] = {}
    for frame in frames:
        if frame["type"] == "response.output_item.added":
            said[frame["item"]["id"]] = ""
            assert frame["item"]["candidate"] == frame["output_index"]
        elif frame["type"] == "response.output_text.delta":
            said[frame["item_id"]] += frame["delta"]
    assert said == {item["id"]: item["content"][0]["text"] for item in response["output"]} and len(said) == 4
    numbers = [frame["sequence_number"] for frame in numbered(frames)]
    assert numbers == list(range(len(numbers)))
    listed = server.request("GET", f"/v1/conversations/{running['conversation_id']}/items?branches=all")[2]["data"]
    stored = {item["id"]: item["content"][0]["text"] for item in listed if item["role"] == "assistant"}
    assert stored == said, "and what is stored is what was shown"
