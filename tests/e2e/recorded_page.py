"""A browser page that records WebSocket frames, requests and errors, with helpers for user actions."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

TIMEOUT_MS = 60_000  # for all waits: the machine may be busy
PICTURES = bool(os.environ.get("CHATCACHE_SCREENSHOTS"))
ANSWER_TOKENS = 400 if PICTURES else 48  # 48: enough to stream, short enough for a slow machine
SEED = 7  # of the sampling: the same replies in every run
ENDS = ("response.completed", "response.incomplete", "response.failed")

# The program that renders texts is loaded with the first text.
DRAWN = "document.querySelector('.prose:not(:empty)') !== null"
OBSERVE_SIGHTING = """selector => {
  const sighted = document.documentElement.dataset;
  delete sighted.sighted;
  const look = () => { if (document.querySelector(selector)) { sighted.sighted = 'yes'; observer.disconnect(); } };
  const observer = new MutationObserver(look);
  observer.observe(document.body, {subtree: true, childList: true, attributes: true});
  look();
}"""
DROP = """async ([selector, files]) => {
  const data = new DataTransfer();
  for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name));
  const at = document.querySelector(selector);
  const send = kind => at.dispatchEvent(new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
  const opened = [send('dragover')];
  await new Promise(resolve => setTimeout(resolve, 50));
  return [...opened, document.querySelector('.drop-zone-over')?.dataset.zone, send('drop')];
}"""
KEEP_TOASTS = """() => {
  const plain = window.setTimeout;
  window.setTimeout = (run, delay, ...more) => plain(run, [6000, 10_000].includes(delay) ? 120_000 : delay, ...more);
}"""


class RecordedPage:
    """One visitor: own storage, one page."""

    def __init__(self, context: Any, server: str) -> None:
        self.context = context
        self.server = server
        context.set_default_timeout(TIMEOUT_MS)
        self.page = context.new_page()
        self.page.add_init_script(
            "if (origin !== 'null')"  # a sandboxed frame has no storage
            f" localStorage['chatcache.sampling'] ??= JSON.stringify({{maxTokens: {ANSWER_TOKENS}, seed: {SEED}}})"
        )
        self.received: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.expected_errors = 0
        self._errors: list[str] = []
        self._external_requests: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._errors.append(f"page error: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("websocket", self._on_socket)

    def problems(self) -> list[str]:
        """Return console errors, uncaught exceptions and requests to other hosts."""
        errors = self._errors[self.expected_errors :]
        return errors + [f"external request: {url}" for url in self._external_requests]

    def ignore_problems(self) -> None:
        """Ignore the problems so far, which the test itself has caused."""
        self.expected_errors = len(self._errors)
        self._external_requests.clear()

    def leave(self) -> None:
        """Close the page and cancel its running responses, which would slow down later tests."""
        begun = {frame["response"]["id"] for frame in self.received if frame["type"] == "response.created"}
        for response in begun - {response["id"] for response in self.ends()}:
            self.page.request.post(f"{self.server}/v1/responses/{response}/cancel")
        self.context.close()

    # -- user actions

    def connected(self) -> None:
        """Wait for the connection: a socket that is closed while it opens causes a console error."""
        self.page.wait_for_selector("#composer")
        self.page.wait_for_selector(".sidebar .dot-on", state="attached")

    def reload(self) -> None:
        """Load the page again."""
        self.page.reload()
        self.connected()

    def say(self, text: str) -> None:
        """Write and send a message as soon as possible."""
        self.page.fill("#composer", text)
        self.page.wait_for_selector("button[aria-label=Send]:enabled")
        if self.page.evaluate("matchMedia('(pointer: coarse)').matches"):  # Return inserts a new line there
            self.page.tap("button[aria-label=Send]")
            return
        self.page.focus("#composer")
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> dict[str, Any]:
        """Send a message, wait for the end of the reply and return the response object."""
        seen = len(self.ends())
        self.say(text)
        return self.wait_end(seen)

    def wait_end(self, seen: int) -> dict[str, Any]:
        """Wait until more than `seen` responses have ended, in the frames and on the page."""
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

    def drop(self, selector: str, files: Sequence[tuple[str, bytes]]) -> list[Any]:
        """Drag files over an element and drop them.

        Return whether the browser acts on the drag, the zone that the page showed, and whether it acts on the drop.
        """
        result: list[Any] = self.page.evaluate(DROP, [selector, [[name, list(data)] for name, data in files]])
        return result

    @contextlib.contextmanager
    def appears(self, selector: str) -> Iterator[None]:
        """Check that the block makes an element visible, if only for a moment."""
        self.page.evaluate(OBSERVE_SIGHTING, selector)
        yield
        self.until("document.documentElement.dataset.sighted === 'yes'")

    def keep_toasts(self) -> None:
        """Keep toasts of this page and their undo buttons for minutes: the machine may be busy."""
        self.page.evaluate(KEEP_TOASTS)

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own wait needs eval, which the policy forbids."""
        for _ in range(TIMEOUT_MS // 50):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def ends(self) -> list[dict[str, Any]]:
        """Responses that ended, in order."""
        return [frame["response"] for frame in self.received if frame["type"] in ENDS]

    def answers(self) -> list[str]:
        """Texts of the replies on the shown path."""
        texts: list[str] = self.page.locator(".answer .prose").all_inner_texts()
        return texts

    def said(self) -> list[str]:
        """Texts of the user messages on the shown path."""
        texts: list[str] = self.page.locator(".user-text").all_inner_texts()
        return texts

    def figure(self, name: str) -> int:
        """Return a statistic of the last reply."""
        return int(self.page.locator(f"[data-stat={name}]").last.inner_text())

    # -- the record

    def _on_console(self, message: Any) -> None:
        url = message.location.get("url", "")
        # A browser logs every refused request; the page handles a 409 by reading the conversation again, and shows no
        # token counts for a branch that is longer than the context.
        # Playwright warns of the service worker that `open_page` blocks.
        expected = "status of 409" in message.text or "blocked by Playwright" in message.text
        expected |= "status of 400" in message.text and url.endswith("/v1/cache/explain")
        if message.type in ("error", "warning") and not expected:
            self._errors.append(f"console {message.type}: {message.text} ({url})")

    def _on_request(self, request: Any) -> None:
        self.asked.append(request.url)
        if not request.url.startswith((self.server + "/", "data:", "blob:")):
            self._external_requests.append(request.url)

    def _on_socket(self, socket: Any) -> None:
        if not socket.url.startswith(self.server.replace("http", "ws", 1) + "/"):
            self._external_requests.append(socket.url)
        socket.on("framesent", lambda text: self.sent.append(json.loads(text)))
        socket.on("framereceived", lambda text: self.received.append(json.loads(text)))


def stores_active_leaf(response: Any) -> bool:
    """Return whether the page stored the active branch on the server."""
    asked = response.request
    return (
        asked.method == "POST" and "/v1/conversations/conv_" in asked.url and "active_leaf" in (asked.post_data or "")
    )


def endless_create(text: str) -> str:
    """Change a `response.create` so that its reply does not end by itself."""
    frame = json.loads(text)
    if frame["type"] == "response.create":
        frame |= {"ignore_eos": True, "max_output_tokens": 1500}  # recognised by `throttled_server`
    return json.dumps(frame)


def pass_endless(link: Any) -> None:
    """Route handler: the real server, with endless replies."""
    upstream = link.connect_to_server()
    link.on_message(lambda message: upstream.send(endless_create(message)))
