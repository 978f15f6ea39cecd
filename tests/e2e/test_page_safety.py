"""What the page must never do, and who must be able to use it: policy, hostile text, axe, keyboard, phone."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.needs import need
from tests.e2e.watched import Watched

WEB = Path(__file__).parents[2] / "web"
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'self'",
}
# Must stay text wherever it turns up. web/test/corpus.ts holds the longer list, for the renderer alone.
HOSTILE = """<script>window.__xss = 1</script> <img src=x onerror="window.__xss=1"> <svg onload=window.__xss=1>

[click](javascript:window.__xss=1) [data](data:text/html,<script>window.__xss=1</script>)

![pixel](https://evil.example/pixel.png?leak=1) <iframe src="https://evil.example"></iframe>

| <img src=x onerror=window.__xss=1> | b |
|---|---:|
| <style>@import 'https://evil.example/x.css'</style> | 1 |

```html"><script>window.__xss=1</script>
<script>window.__xss = 1</script>
```
"""


def test_the_policy_is_sent_and_the_page_keeps_it(server: str) -> None:
    with urllib.request.urlopen(server, timeout=10) as reply:
        sent = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        html = reply.read().decode()
    assert sent == POLICY
    assert "style=" not in html
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"(?:src|href)=\"(?!\./)", html) == []


def test_first_load_is_small() -> None:
    """At most 120 KB on the wire: what index.html names, compressed, and the text font."""
    import gzip

    static = WEB.parent / "chatcache" / "gateway" / "static"
    html = (static / "index.html").read_bytes()
    total = len(gzip.compress(html))
    for name in re.findall(rb"(?:src|href)=\"\./([^\"]+)\"", html):
        total += len(gzip.compress((static / name.decode()).read_bytes()))
    total += sum(font.stat().st_size for font in static.glob("assets/geist-latin-*.woff2"))
    assert total <= 120_000


def test_axe_finds_nothing_in_either_theme(open_page: Any, picture: Any) -> None:
    need(AXE.is_file(), "axe-core", "cd web && npm ci")
    chat: Watched = open_page(bypass_csp=True, reduced_motion="reduce")
    chat.page.add_script_tag(path=AXE)
    _no_violations(chat, "empty")
    chat.ask("What is a KV page?")
    chat.ask("Make a table of animals and their sounds")
    chat.ask("Write Python code that prints hello")
    _no_violations(chat, "thread", picture)
    chat.page.click("[aria-label=Settings]")
    _no_violations(chat, "settings")
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Control+/")
    chat.page.wait_for_selector("dialog[open]")
    _no_violations(chat, "shortcuts")
    chat.page.keyboard.press("Escape")
    chat.page.click("[aria-label='More answers']")
    chat.ask("Tell me a story about a robot")
    _no_violations(chat, "candidates")


def test_hostile_words_of_the_reader_stay_words(chat: Watched) -> None:
    chat.ask(HOSTILE)
    assert chat.page.evaluate("window.__xss") is None
    assert chat.said()[0].startswith("<script>")
    assert chat.page.locator(".said-text *").count() == 0


def test_hostile_words_of_the_model_stay_words(browser: Any, server: str) -> None:
    """A server that says the worst: the frames come from the test."""
    chat = Watched(browser.new_context(), server)
    chat.page.route_web_socket(re.compile("/v1/responses"), _say(HOSTILE))
    chat.page.goto(server)
    chat.page.wait_for_selector(".dot-on")
    chat.say("Hello")
    chat.page.wait_for_selector(".answer[data-status=done]")
    chat.page.wait_for_timeout(200)
    assert chat.page.evaluate("window.__xss") is None
    inside = chat.page.locator(".answer .prose")
    assert inside.locator("script, img, svg, iframe, style, [style], [onerror], [onload]").count() == 0
    links = inside.locator("a").evaluate_all("links => links.map(link => [link.href, link.rel, link.target])")
    assert "https://evil.example/pixel.png?leak=1" in [href for href, _, _ in links]  # to click, not to load
    assert all(href.startswith("https:") for href, _, _ in links)
    assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer nofollow", "_blank")}
    assert chat.complaints() == []
    chat.context.close()


def test_everything_by_keyboard(chat: Watched) -> None:
    page = chat.page
    assert page.evaluate("document.activeElement.id") == "composer"
    page.keyboard.type("Tell me a story about an owl")
    _tab_to(chat, "More answers")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Escape")
    page.keyboard.press("Enter")
    chat.wait_end(0)
    page.keyboard.press("Alt+2")
    assert page.locator(".answer .switcher-place").inner_text() == "2/2"
    assert page.locator("#status").inner_text() == "Picked answer 2."
    page.keyboard.press("Alt+ArrowLeft")
    assert page.locator(".answer .switcher-place").inner_text() == "1/2"
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("Control+k")
    chat.until("document.activeElement.id === 'find'")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".empty")
    _tab_to(chat, "Light theme")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_phone(open_page: Any, picture: Any) -> None:
    phone = {"width": 390, "height": 844}
    chat: Watched = open_page(viewport=phone, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert chat.page.locator(".side").is_hidden()
    chat.page.wait_for_timeout(200)  # what follows the end of a thread would have moved by now
    assert chat.page.evaluate("document.querySelector('.thread-scroll').scrollTop") == 0
    chat.page.tap(".starter >> text=Four stories")
    chat.wait_end(0)
    picture(chat.page, "phone")
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
    chat.page.tap(".card-pick >> nth=0")
    assert len(chat.answers()) == 1
    chat.page.tap("[aria-label='Show the list']")
    assert chat.page.locator(".side").is_visible()
    chat.page.tap(".new-chat")
    chat.page.wait_for_selector(".empty")
    assert chat.page.locator(".side").is_hidden()
    boxes = [
        button.bounding_box() for button in chat.page.locator(".composer button:visible, .top button:visible").all()
    ]
    assert boxes and all(box["height"] >= 24 and box["width"] >= 24 for box in boxes), "a touch target is under 24 px"


def _no_violations(chat: Watched, where: str, picture: Any = None) -> None:
    for scheme in ("dark", "light"):
        chat.page.emulate_media(color_scheme=scheme)
        chat.page.wait_for_timeout(200)  # colours settle
        if picture:
            picture(chat.page, scheme)
        _run_axe(chat, f"{where}, {scheme}")


def _run_axe(chat: Watched, where: str) -> None:
    found = chat.page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)")
    told = [(rule["id"], rule["impact"], [node["html"][:160] for node in rule["nodes"]]) for rule in found]
    assert told == [], where


def _tab_to(chat: Watched, label: str) -> None:
    for _ in range(250):
        chat.page.keyboard.press("Tab")
        if chat.page.evaluate("document.activeElement.getAttribute('aria-label')") == label:
            return
    raise AssertionError(f"Tab does not reach {label!r}")


def _say(text: str) -> Any:
    """Route handler: a socket that answers every message with `text`, a few characters at a time."""

    def serve(link: Any) -> None:
        limits = {"max_frame_bytes": 1 << 20, "max_n": 8, "max_beam_width": 8}
        session = {"model": "m", "max_model_len": 99, "limits": limits}
        link.send(json.dumps({"type": "session.created", "session": session}))

        def answer(message: str) -> None:
            asked = json.loads(message)
            if asked["type"] != "response.create":
                return
            lane = {"stream_id": asked["stream_id"]}
            response = {"id": "resp_1", "status": "in_progress", "conversation": None, "input_item_ids": ["msg_1"]}
            item = {"output_index": 0, "item": {"id": "msg_2", "finish_reason": "stop"}}
            frames: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
            frames += [{"type": "response.output_item.added", **item}]
            pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
            frames += [{"type": "response.output_text.delta", "output_index": 0, "delta": piece} for piece in pieces]
            frames += [{"type": "response.output_text.done", "output_index": 0, "text": text}]
            frames += [{"type": "response.output_item.done", **item}]
            frames += [{"type": "response.completed", "response": response | {"status": "completed", "usage": None}}]
            for frame in frames:
                link.send(json.dumps(frame | lane))

        link.on_message(answer)

    return serve
