"""Test a thousand messages: few of them in the document, and only the reader moves the scroll position."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import call, create_conversation

pytestmark = pytest.mark.slow

COUNT = 1000
MOST_ROWS = 60
MOST_NODES = 4000
ROWS = "[...document.querySelectorAll('.row')]"
# The messages on the screen: key, distance of their top from the top of the screen, and the screen's height.
ON_SCREEN = f"""(() => {{
  const box = document.querySelector('.thread-scroll').getBoundingClientRect();
  const rows = {ROWS}.map(row => [row, row.getBoundingClientRect()]);
  return rows.filter(([, at]) => at.bottom > box.top && at.top < box.bottom)
    .map(([row, at]) => [row.dataset.key, at.top - box.top, at.bottom - box.top])
    .map(([key, top, bottom]) => ({{key, top, bottom, height: box.height}}));
}})()"""
BELOW = "(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.querySelector('.thread-scroll'))"
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))"


def _text(place: int) -> str:
    """Return text of very different heights, so that every estimate is wrong."""
    if place % 2 == 0:
        return f"Question {place}" + " and so on" * (place % 13)
    blocks = [
        f"Answer {place}.",
        "word " * (place * 37 % 400),
        "- item\n" * (place % 7),
        "```js\nlet a = 1;\n```" * (place % 3 == 0),
    ]
    return "\n\n".join(block for block in blocks if block)


@pytest.fixture(scope="module")
def long_talk(server: str) -> str:
    return create_conversation(server, [_text(place) for place in range(COUNT)], title="A long one")


@pytest.fixture
def long_page(open_page: Any, long_talk: str) -> RecordedPage:
    chat: RecordedPage = open_page(f"/#{long_talk}")
    chat.page.wait_for_selector(f"text=Answer {COUNT - 1}.")
    chat.page.evaluate(FRAMES)
    return chat


def test_thousand_messages_render_as_a_few_rows(long_page: RecordedPage) -> None:
    page = long_page.page
    long_page.until(f"{BELOW} < 2")
    box = page.locator(".thread-scroll")
    height = page.evaluate("document.querySelector('.thread-scroll').scrollHeight")
    assert height > COUNT * 80
    seen: list[str] = []
    for step in range(12, -1, -1):
        box.evaluate("(box, share) => box.scrollTop = share * box.scrollHeight", step / 12)
        page.evaluate(FRAMES)
        rows = page.evaluate(ON_SCREEN)
        seen += [row["key"] for row in rows[:1]]
        assert rows[0]["top"] <= 17 and rows[-1]["bottom"] >= rows[0]["height"] - 33, f"a hole at {step}/12"
        for above, row in itertools.pairwise(rows):
            assert abs(above["bottom"] - row["top"]) < 1
        assert page.locator(".row").count() <= MOST_ROWS
        assert page.evaluate("document.querySelectorAll('*').length") <= MOST_NODES
    assert len(set(seen)) == len(seen)
    assert page.locator(".row").first.get_attribute("aria-posinset") == "1"
    assert page.locator("text=Question 0").count() == 1
    assert page.locator(".row").last.get_attribute("aria-posinset") == str(COUNT)


def test_messages_are_read_compressed_and_only_the_new_ones_after_a_change_elsewhere(chat: RecordedPage) -> None:
    made = create_conversation(chat.server, [_text(place) for place in range(200)])
    with chat.page.expect_response(re.compile("/items")) as opening:
        chat.page.evaluate("hash => location.hash = hash", made)
    size = opening.value.request.sizes()["responseBodySize"]
    assert opening.value.headers["content-encoding"] == "gzip" and 5 * size < len(opening.value.body())
    chat.page.wait_for_selector("text=Answer 199.")
    items = f"/v1/conversations/{made}/items"
    added = {"items": [{"role": "user", "content": "From elsewhere"}]}
    with chat.page.expect_response(re.compile("/items")) as reading:
        (item,) = call(chat.server, "POST", items, added)["data"]
    listed = [entry["id"] for entry in reading.value.json()["data"]]
    assert listed[0] == item["id"] and len(listed) <= 20
    chat.page.wait_for_selector("text=From elsewhere")
    for deleted, num_left in ((opening.value.json()["data"][7]["id"], 200), (item["id"], 199)):
        with chat.page.expect_response(lambda response: response.url.endswith("/items?branches=all")) as again:
            call(chat.server, "DELETE", f"{items}/{deleted}")
        assert len(again.value.json()["data"]) == num_left, "all but the deleted ones"
    chat.page.wait_for_selector("text=From elsewhere", state="detached")


def test_notification_leaves_the_jump_button_free(long_page: RecordedPage) -> None:
    page = long_page.page
    long_page.expected_errors += 1
    page.mouse.move(640, 400)
    page.mouse.wheel(0, -3000)
    page.wait_for_selector("[aria-label='Jump to the latest']")
    long_page.drop(".sidebar", [("note.txt", b"Hello")])  # refused
    toast = page.locator(".toast").bounding_box()
    button = page.locator("[aria-label='Jump to the latest']").bounding_box()
    assert toast and button and toast["y"] + toast["height"] <= button["y"]


def test_scroll_position_moves_with_the_wheel_only(long_page: RecordedPage) -> None:
    """Scroll upwards, into rows whose heights were only estimated."""
    page = long_page.page
    page.mouse.move(640, 400)
    for _ in range(12):
        before = page.evaluate(ON_SCREEN)[0]
        page.mouse.wheel(0, -240)
        long_page.until(f"Math.abs({_top_of(before['key'])} - {before['top'] + 240}) < 2")
        page.evaluate(FRAMES)
        assert page.evaluate(_top_of(before["key"])) == pytest.approx(before["top"] + 240, abs=2)
    page.set_viewport_size({"width": 700, "height": 800})  # changes every height
    page.evaluate(FRAMES)
    held = page.evaluate(ON_SCREEN)[0]
    page.set_viewport_size({"width": 1100, "height": 800})
    page.evaluate(FRAMES)
    assert page.evaluate(_top_of(held["key"])) == pytest.approx(held["top"], abs=2)


def test_growing_reply_does_not_move_the_view_above(chat: RecordedPage) -> None:
    """A hundred messages: enough for virtual rows, few enough for the model's context."""
    page = chat.page
    many = create_conversation(chat.server, ["Hi", "Hello."] * 50)
    page.route_web_socket(re.compile("/v1/responses"), _pass_on)
    page.goto(f"{chat.server}/#{many}")
    chat.reload()
    page.wait_for_selector(".row >> text=Hello.")
    assert page.locator(".row").count() < 100
    chat.say("Tell me a story about a dragon")
    length = "(document.querySelector('.row:last-of-type .prose')?.textContent.length ?? 0)"
    chat.until(f"{length} > 100")
    chat.until(f"{BELOW} < 2")  # one line may be below until the next frame
    page.mouse.move(640, 400)
    page.mouse.wheel(0, -1200)
    page.wait_for_selector("[aria-label='Jump to the latest']")
    page.evaluate(FRAMES)
    held = page.evaluate(ON_SCREEN)[0]
    grown = page.evaluate(length)
    chat.until(f"{length} > {grown + 300}")
    assert page.evaluate(_top_of(held["key"])) == pytest.approx(held["top"], abs=1)
    page.click("[aria-label='Jump to the latest']")
    chat.until(f"{BELOW} < 2")
    shown = page.evaluate(length)
    chat.until(f"{length} > {shown + 100}")
    chat.until(f"{BELOW} < 2")
    page.wait_for_selector("[aria-label='Jump to the latest']", state="detached")
    page.keyboard.press("Escape")
    page.wait_for_selector("button[aria-label=Send]")


def test_address_leads_to_any_message(long_page: RecordedPage, long_talk: str) -> None:
    path = f"/v1/conversations/{long_talk}/items?order=asc&limit=100&after="
    page, last = long_page.page, ""
    items: list[dict[str, Any]] = []
    while len(items) < 400:
        items += call(long_page.server, "GET", path + last if last else path.removesuffix("&after="))["data"]
        last = items[-1]["id"]
    for place in (301, 12, 301):
        page.evaluate("hash => location.hash = hash", f"{long_talk}/{items[place]['id']}")
        long_page.until(f"{_top_of(items[place]['id'])} !== null")
        page.evaluate(FRAMES)
        assert 0 <= page.evaluate(_top_of(items[place]["id"])) <= 40
        assert page.evaluate("document.activeElement.dataset.key") == items[place]["id"]
    assert page.evaluate("location.hash").startswith(f"#{long_talk}")


def _top_of(key: str) -> str:
    row = f"document.querySelector('.row[data-key=\"{key}\"]')"
    box = "document.querySelector('.thread-scroll').getBoundingClientRect().top"
    return f"({row} ? {row}.getBoundingClientRect().top - {box} : null)"


def _pass_on(link: Any) -> None:
    """Forward to the real server; replies end only when the context of the model is full."""
    upstream = link.connect_to_server()

    def forward(text: str) -> None:
        frame = json.loads(text)
        if frame["type"] == "response.create":
            frame |= {"ignore_eos": True, "max_output_tokens": 1200}
        upstream.send(json.dumps(frame))

    link.on_message(forward)
