"""One branch of a conversation as an HTML file: readable anywhere, without scripts and without requests to any server.

The texts come from models and clients, so nothing in them is trusted: raw HTML is escaped, links lead to http, https
and mailto only, images become links. A policy in the file forbids everything but its own style sheet.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape

from markdown_it import MarkdownIt

from chatcache.conversations.tree import Item

_SCHEMES = ("http:", "https:", "mailto:")
_NAMES = {"user": "You", "assistant": "Assistant", "system": "System", "tool": "Tool"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f23; --dim: #5c6670; --line: #d8dee4; --soft: #f4f6f8; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --dim: #9aa5b1; --line: #333b43; --soft: #1d2226; --page: #14181b }
}
body { max-width: 46rem; margin: 0 auto; padding: 2rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.6 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; line-height: 1.3 }
article { margin: 1.5rem 0 }
article > h2 { margin: 0 0 .25rem; color: var(--dim); font-size: .8rem; font-weight: 600 }
.user { padding: .75rem 1rem; border-radius: .75rem; background: var(--soft) }
.plain { white-space: pre-wrap }
pre { overflow: auto; padding: .75rem 1rem; border-radius: .5rem; background: var(--soft) }
code { font: .875em/1.5 ui-monospace, monospace }
.wide { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: .3rem .6rem; border: 1px solid var(--line); text-align: start }
blockquote { margin-inline: 0; padding-inline-start: 1rem; border-inline-start: 3px solid var(--line) }
details { color: var(--dim) }
footer { margin-top: 3rem; color: var(--dim); font-size: .8rem }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'"


def branch_html(title: str, items: Sequence[Item], note: str = "") -> str:
    """Return messages as an HTML document. `note`: a line at its end."""
    name = escape(" ".join(title.split()) or "Conversation")
    body = "\n".join(part for item in items for part in _article(item))
    foot = f"<footer>{escape(note)}</footer>\n" if note else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<meta name="robots" content="noindex">\n'
        f'<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1 dir="auto">{name}</h1>\n'
        f"<main>\n{body}\n</main>\n{foot}</body>\n</html>\n"
    )


def _article(item: Item) -> Iterator[str]:
    role = item.role if item.role in _NAMES else "tool"
    yield f'<article class="{role}">\n<h2>{_NAMES[role]}</h2>'
    if item.parts.reasoning.strip():
        reasoning = _parser().render(item.parts.reasoning)
        yield f'<details>\n<summary>Reasoning</summary>\n<div dir="auto">{reasoning}</div>\n</details>'
    if role == "assistant":
        yield f'<div dir="auto">{_parser().render(item.text)}</div>'
    elif item.text:
        yield f'<div class="plain" dir="auto">{escape(item.text)}</div>'
    for call in item.parts.tool_calls:
        yield f"<p>Call of <code>{escape(call.name)}</code></p>\n<pre><code>{escape(call.arguments)}</code></pre>"
    yield "</article>"


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    parser = _Parser("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    parser.disable("image")  # `![name](address)` becomes "!" and a link
    parser.add_render_rule("link_open", _link_open)
    parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table>')
    parser.add_render_rule("table_close", lambda *_: "</table></div>")
    for name in ("th_open", "td_open"):
        parser.add_render_rule(name, _cell_open)
    return parser


class _Parser(MarkdownIt):
    def validateLink(self, url: str) -> bool:
        """Return whether a link may lead to this address."""
        return url.strip().lower().startswith(_SCHEMES)


def _link_open(self: object, tokens: Sequence[object], index: int, *_: object) -> str:
    href = escape(str(tokens[index].attrs.get("href", "")))  # type: ignore[attr-defined]
    return f'<a href="{href}" rel="noopener noreferrer nofollow" title="{href}">'


def _cell_open(self: object, tokens: Sequence[object], index: int, *_: object) -> str:
    return f'<{tokens[index].tag} dir="auto">'  # type: ignore[attr-defined]
