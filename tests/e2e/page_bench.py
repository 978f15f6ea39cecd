"""Measure the chat page: `python -m tests.e2e.page_bench`.

Measures bytes and time of a first load, and main-thread time while a long answer arrives.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import sync_playwright

from chatcache.bench.report import Figure, compare, figure_table
from tests.e2e.scripted_server import Script, scripted

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
GOAL_MS_PER_S = 50
DURATIONS = {
    "ScriptDuration": "scripting",
    "LayoutDuration": "layout",
    "RecalcStyleDuration": "style",
    "TaskDuration": "all",
}
# Records when the message box is editable and the socket is open.
WATCH_READY = """
addEventListener("DOMContentLoaded", () => {
  const look = () => {
    if (document.querySelector("#composer") && document.querySelector(".dot-on")) window.readyMs = performance.now();
    else requestAnimationFrame(look);
  };
  look();
});
"""
WORDS = re.findall(
    r"\w+", "pages that several branches share are written once and read by all until the last one lets go"
)


def _prose(words: int, start: int = 0) -> str:
    return " ".join(itertools.islice(itertools.cycle(WORDS), start, start + words))


def _mixed() -> Iterator[str]:
    for part in itertools.count(1):
        yield f"## Part {part}\n\n{_prose(60, part)} with **bold** and `code`, see [this](https://example.com).\n\n"
        yield f"- {_prose(9)}\n- {_prose(12)}\n  - {_prose(6)}\n\n"
        yield "```python\ndef share(page):\n    for branch in page.branches:\n        yield branch\n```\n\n"
        yield f"| state | pages |\n|---|---:|\n| shared | {part} |\n| idle | {part * 7} |\n\n"
        yield f"So $n_{part} = \\frac{{{part}}}{{2}}$, or\n\n$$\n\\sum_i p_i = {part}\n$$\n\n"


TEXTS: dict[str, Any] = {
    "mixed": _mixed,
    "one list": lambda: (f"- {_prose(10, item)}\n" for item in itertools.count()),
    "one table": lambda: itertools.chain(
        ["| a | b |\n|---|---|\n"], (f"| {_prose(4, row)} | {row} |\n" for row in itertools.count())
    ),
    "one program": lambda: itertools.chain(
        ["```python\n"], (f"value_{line} = share({line})\n" for line in itertools.count())
    ),
    "one paragraph": lambda: (f"{_prose(10, start)}, " for start in itertools.count()),
}


def deltas(kind: str, count: int) -> list[str]:
    """Return the first `count` pieces, each about a token, of an endless text."""
    pieces = itertools.chain.from_iterable(re.findall(r"\s?\w{1,6}|\s|\S", part) for part in TEXTS[kind]())
    return list(itertools.islice(pieces, count))


def measure_load(browser: Any, url: str) -> list[Figure]:
    """Measure the transferred bytes and the time to interactive with an empty cache."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(WATCH_READY)
    wire = context.new_cdp_session(page)
    wire.send("Network.enable")
    loaded: list[float] = []
    wire.on("Network.loadingFinished", lambda event: loaded.append(event["encodedDataLength"]))
    page.goto(url)
    page.wait_for_selector(".dot-on")
    page.wait_for_timeout(500)
    ready_ms = page.evaluate("window.readyMs")
    context.close()
    return [
        Figure(f"first load, {len(loaded)} requests", sum(loaded) / 1000, "KB"),
        Figure("first load, interactive", ready_ms, "ms"),
    ]


def measure_answer(browser: Any, url: str, script: Script, kind: str, count: int, per_s: float) -> list[Figure]:
    """Measure main-thread time per second while an answer of `count` deltas arrives."""
    script.deltas, script.deltas_per_s = deltas(kind, count), per_s
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(".dot-on")
    wire = context.new_cdp_session(page)
    wire.send("Performance.enable", {"timeDomain": "threadTicks"})  # excludes the time of other programs
    page.fill("#composer", "Go")

    def metrics() -> dict[str, float]:
        return {entry["name"]: entry["value"] for entry in wire.send("Performance.getMetrics")["metrics"]}

    started, before = time.perf_counter(), metrics()
    page.keyboard.press("Enter")
    page.wait_for_timeout(1000 * count / per_s)  # polling the page would add scripting time
    seconds, after = time.perf_counter() - started, metrics()
    page.wait_for_selector(".answer[data-status=done]")
    spent = {label: 1000 * (after[name] - before[name]) / seconds for name, label in DURATIONS.items()}
    context.close()
    scripting = spent.pop("scripting")
    return [
        compare(f"{kind}, {count} deltas: scripting", scripting, "ms/s", GOAL_MS_PER_S, "goal", "<= 1.00"),
        *(Figure(f"{kind}, {count} deltas: {label}", ms, "ms/s") for label, ms in spent.items()),
    ]


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deltas", type=int, default=4277)
    parser.add_argument("--per-second", type=float, default=250.0)
    parser.add_argument("--text", choices=[*TEXTS, "all"], default="all")
    options = parser.parse_args()
    script = Script()
    with scripted(script) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        figures = measure_load(browser, url)
        for kind in TEXTS if options.text == "all" else [options.text]:
            figures += measure_answer(browser, url, script, kind, options.deltas, options.per_second)
        browser.close()
    print(figure_table(figures))


if __name__ == "__main__":
    main()
