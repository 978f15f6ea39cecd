"""A browser page that keeps a record: frames on its socket, requests, errors; and the verbs of a reader."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

TIMEOUT_MS = 60_000  # whatever is waited for: the machine may be busy
PICTURES = bool(os.environ.get("CHATCACHE_SCREENSHOTS"))
ANSWER_TOKENS = 400 if PICTURES else 48  # 48: enough to stream, short enough for a slow machine
SEED = 7  # of what the model draws: the same answers every time
ENDS = ("response.completed", "response.incomplete", "response.failed")

# Texts are drawn by a program that comes with the first of them.
DRAWN = "document.querySelector('.prose:not(:empty)') !== null"
SIGHT = """selector => {
  const sighted = document.documentElement.dataset;
  delete sighted.sighted;
  const look = () => { if (document.querySelector(selector)) { sighted.sighted = 'yes'; observer.disconnect(); } };
  const observer = new MutationObserver(look);
  observer.observe(document.body, {subtree: true, childList: true, attributes: true});
  look();
}"""
UNHURRIED = """() => {
  const plain = window.setTimeout;
  window.setTimeout = (run, delay, ...more) => plain(run, delay === 6000 ? 120_000 : delay, ...more);
}"""


class Watched:
    """One visitor: own storage, one page."""

    def __init__(self, context: Any, server: str) -> None:
        self.context = context
        self.server = server
        context.set_default_timeout(TIMEOUT_MS)
        self.page = context.new_page()
        self.page.add_init_script(
            f"localStorage['chatcache.sampling'] ??= JSON.stringify({{maxTokens: {ANSWER_TOKENS}, seed: {SEED}}})"
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

    def leave(self) -> None:
        """Close the page; what is still written for it ends, or it would slow down whoever comes next."""
        begun = {frame["response"]["id"] for frame in self.received if frame["type"] == "response.created"}
        for response in begun - {response["id"] for response in self.ends()}:
            self.page.request.post(f"{self.server}/v1/responses/{response}/cancel")
        self.context.close()

    # -- a reader's verbs

    def connected(self) -> None:
        """Wait for the connection: a socket that is cut while it opens is told in the console."""
        self.page.wait_for_selector("#composer")
        self.page.wait_for_selector(".sidebar .dot-on", state="attached")

    def reload(self) -> None:
        """Load the page again."""
        self.page.reload()
        self.connected()

    def say(self, text: str) -> None:
        """Write and send, as soon as that can be done."""
        self.page.fill("#composer", text)
        self.page.wait_for_selector("button[aria-label=Send]:enabled")
        self.page.focus("#composer")
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> dict[str, Any]:
        """Say something and wait for the end of answer; returns the response object."""
        seen = len(self.ends())
        self.say(text)
        return self.wait_end(seen)

    def wait_end(self, seen: int) -> dict[str, Any]:
        """Wait until one more response than `seen` has ended, on the wire and on the page."""
        for _ in range(TIMEOUT_MS // 50):
            if len(self.ends()) > seen:
                break
            self.page.wait_for_timeout(50)
        assert len(self.ends()) > seen, "no answer came to its end"
        self.page.wait_for_selector("button[aria-label=Send]")
        response: dict[str, Any] = self.ends()[seen]
        assert response["status"] != "failed", response["error"]
        if any(part.get("text") for item in response["output"] for part in item.get("content") or ()):
            self.until(f"{DRAWN} || !document.querySelector('.prose:empty')")
        return response

    @contextlib.contextmanager
    def sighting(self, selector: str) -> Iterator[None]:
        """What the block does brings something onto the page, if only for a moment."""
        self.page.evaluate(SIGHT, selector)
        yield
        self.until("document.documentElement.dataset.sighted === 'yes'")

    def unhurried(self) -> None:
        """Toasts of this page, and what they offer to take back, stay for minutes: the machine may be busy."""
        self.page.evaluate(UNHURRIED)

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own wait needs the eval that the policy forbids."""
        for _ in range(TIMEOUT_MS // 50):
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
        texts: list[str] = self.page.locator(".user-text").all_inner_texts()
        return texts

    def figure(self, name: str) -> int:
        """A figure below the last answer."""
        return int(self.page.locator(f"[data-stat={name}]").last.inner_text())

    # -- the record

    def _on_console(self, message: Any) -> None:
        # A browser tells of every refusal; that somebody was quicker is one that the page answers by reading again.
        if message.type in ("error", "warning") and "status of 409" not in message.text:
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


def tells_leaf(response: Any) -> bool:
    """Whether the page told the server which branch is shown."""
    asked = response.request
    return (
        asked.method == "POST" and "/v1/conversations/conv_" in asked.url and "active_leaf" in (asked.post_data or "")
    )


def endless_create(text: str) -> str:
    """Change a `response.create` so that its answer does not end by itself."""
    frame = json.loads(text)
    if frame["type"] == "response.create":
        frame |= {"ignore_eos": True, "max_output_tokens": 1500}  # `paced` knows it by that
    return json.dumps(frame)


def pass_endless(link: Any) -> None:
    """Route handler: the real server at the other end, endless answers."""
    upstream = link.connect_to_server()
    link.on_message(lambda message: upstream.send(endless_create(message)))
