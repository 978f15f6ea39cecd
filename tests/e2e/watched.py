"""A browser page that keeps a record: frames on its socket, requests, errors; and the verbs of a reader."""

from __future__ import annotations

import json
import os
from typing import Any

ANSWER_TIMEOUT_MS = 60_000
PICTURES = bool(os.environ.get("CHATCACHE_SCREENSHOTS"))
ANSWER_TOKENS = 400 if PICTURES else 48  # 48: enough to stream, short enough for a slow machine
ENDS = ("response.completed", "response.incomplete", "response.failed")


class Watched:
    """One visitor: own storage, one page."""

    def __init__(self, context: Any, server: str) -> None:
        self.context = context
        self.server = server
        self.page = context.new_page()
        self.page.add_init_script(
            f"localStorage['chatcache.sampling'] ??= JSON.stringify({{maxTokens: {ANSWER_TOKENS}}})"
        )
        self.received: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.expected_errors = 0
        self._errors: list[str] = []
        self._strangers: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._errors.append(f"page error: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("websocket", self._on_socket)

    def complaints(self) -> list[str]:
        """What a clean visit must not show: console errors, uncaught exceptions, requests to other hosts."""
        errors = self._errors[self.expected_errors :]
        return errors + [f"external request: {url}" for url in self._strangers]

    def forgive(self) -> None:
        """What was complained of until now was the test's own doing."""
        self.expected_errors = len(self._errors)

    # -- a reader's verbs

    def say(self, text: str) -> None:
        """Write and send."""
        self.page.fill("#composer", text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> dict[str, Any]:
        """Say something and wait for the end of the answer; returns the response object."""
        seen = len(self.ends())
        self.say(text)
        return self.wait_end(seen)

    def wait_end(self, seen: int) -> dict[str, Any]:
        """Wait until one more response than `seen` has ended, on the wire and on the page."""
        for _ in range(ANSWER_TIMEOUT_MS // 50):
            if len(self.ends()) > seen:
                break
            self.page.wait_for_timeout(50)
        assert len(self.ends()) > seen, "no answer came to its end"
        self.page.wait_for_selector("button[aria-label=Send]")
        response: dict[str, Any] = self.ends()[seen]
        assert response["status"] != "failed", response["error"]
        return response

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own wait needs the eval that the policy forbids."""
        for _ in range(ANSWER_TIMEOUT_MS // 50):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def ends(self) -> list[dict[str, Any]]:
        """Responses that ended, in order."""
        return [frame["response"] for frame in self.received if frame["type"] in ENDS]

    def answers(self) -> list[str]:
        """Texts of the answers on the shown path."""
        texts: list[str] = self.page.locator(".answer .prose").all_inner_texts()
        return texts

    def said(self) -> list[str]:
        """Texts of the reader's messages on the shown path."""
        texts: list[str] = self.page.locator(".said-text").all_inner_texts()
        return texts

    def figure(self, name: str) -> int:
        """A figure below the last answer."""
        return int(self.page.locator(f"[data-figure={name}]").last.inner_text())

    # -- the record

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._errors.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Any) -> None:
        self.asked.append(request.url)
        if not request.url.startswith((self.server + "/", "data:", "blob:")):
            self._strangers.append(request.url)

    def _on_socket(self, socket: Any) -> None:
        if not socket.url.startswith(self.server.replace("http", "ws", 1) + "/"):
            self._strangers.append(socket.url)
        socket.on("framesent", lambda text: self.sent.append(json.loads(text)))
        socket.on("framereceived", lambda text: self.received.append(json.loads(text)))


def endless_create(text: str) -> str:
    """Change a `response.create` so that its answer does not end by itself."""
    frame = json.loads(text)
    if frame["type"] == "response.create":
        frame |= {"ignore_eos": True, "max_output_tokens": 1500}
    return json.dumps(frame)


def pass_endless(link: Any) -> None:
    """Route handler: the real server at the other end, endless answers."""
    upstream = link.connect_to_server()
    link.on_message(lambda message: upstream.send(endless_create(message)))
