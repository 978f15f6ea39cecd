"""Conversations as HTML files, parsed back by the parser of the standard library."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chatcache.conversations.tree import Item, ReplyParts, ToolCall
from chatcache.transfer.html import branch_html

CORPUS = Path(__file__).parents[2] / "web" / "test" / "corpus.json"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "article", "footer", "details", "summary", "div"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "em", "strong", "s", "a", "code", "pre", "blockquote"),
    *("ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "class", "dir", "href", "rel", "title", "start"}


class Elements(HTMLParser):
    """Collects the elements, their attributes and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_hostile_texts_become_no_active_content(role: str) -> None:
    texts = json.loads(CORPUS.read_text())
    parts = ReplyParts(reasoning="", tool_calls=(ToolCall("c", "<b>f", "</code><script>"),))
    for text in texts:
        reasoning = ReplyParts(reasoning=text, tool_calls=parts.tool_calls)
        found = Elements(branch_html(text, [Item("a", None, role, text, parts=reasoning)], text))
        assert found.tags <= TAGS and found.attributes <= ATTRIBUTES, text
        assert all(link.startswith(("http:", "https:", "mailto:")) for link in found.links), text


def test_answers_are_drawn_as_markdown_and_questions_as_written() -> None:
    table = "| a | b |\n|---|--:|\n| 1 | **2** |"
    items = [
        Item("a", None, "user", "*plain*\n  text"),
        Item("b", "a", "assistant", f"*em*\n\n```py\nx < 1\n```\n\n{table}", parts=ReplyParts(reasoning="Hm")),
    ]
    page = branch_html("A & B", items, "the end")
    found = Elements(page)
    assert {"em", "pre", "table", "strong", "details"} <= found.tags
    for text in ("*plain*\n  text", "x < 1", "A & B", "the end", "Hm"):
        assert text in found.text
    assert "<title>A &amp; B</title>" in page and 'dir="auto"' in page
