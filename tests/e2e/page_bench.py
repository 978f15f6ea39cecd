"""Measure the chat page: `python -m tests.e2e.page_bench`.

Measures bytes and time of a first load, how long a chat of a thousand messages takes to open, and a typed letter in it
to be painted, frames while an answer arrives, and main-thread time while a long answer arrives.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from chatcache.bench.report import Figure, compare, figure_table
from tests.e2e.rest_client import create_conversation
from tests.e2e.scripted_server import Script, scripted
from tests.e2e.server_process import serving

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
GOAL_MS_PER_S = 100  # a tenth of a core, at up to 30 drawings a second
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
NUM_MESSAGES = 1000
MAX_OPEN_MS, MAX_PAINT_MS = 400, 40
NUM_LETTERS = 100
MIN_FRAMES, MIN_SLOW_UPDATES = 60, 20  # per second; the second on a processor that is 4 times slower
FRAME_DELTAS_PER_S, FRAME_SECONDS = 250, 8
OPEN = """async ([id, last]) => {
  const begun = performance.now();
  location.hash = id;
  const frame = () => new Promise(requestAnimationFrame);
  while (!document.body.textContent.includes(last)) await frame();
  await frame();
  return performance.now() - begun;
}"""
# From the event of a key to the first task after the frame that shows it.
WATCH_PAINTS = """() => {
  window.paintsMs = [];
  document.querySelector("#composer").addEventListener("input", ({ timeStamp }) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => paintsMs.push(performance.now() - timeStamp);
    channel.port2.postMessage(null);
  }));
}"""
# Frames, and frames in which the text of the answer has changed, per second.
COUNT_FRAMES = """async seconds => {
  let [frames, updates, length] = [0, 0, 0];
  const begun = performance.now();
  while (performance.now() < begun + 1000 * seconds) {
    await new Promise(requestAnimationFrame);
    frames++;
    const now = document.querySelector(".answer .prose")?.textContent.length ?? 0;
    if (now !== length) updates++;
    length = now;
  }
  const passed = (performance.now() - begun) / 1000;
  return [frames / passed, updates / passed];
}"""


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


def measure_long_chat(browser: Any, url: str) -> list[Figure]:
    """Measure a chat of NUM_MESSAGES: the time to open it, and from a typed letter to the frame that shows it."""
    texts = [
        f"Question {place}" if place % 2 == 0 else f"Answer {place}. {_prose(80)}" for place in range(NUM_MESSAGES)
    ]
    chat = create_conversation(url, texts)
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(".dot-on")
    page.wait_for_timeout(1000)
    open_ms = page.evaluate(OPEN, [chat, f"Answer {NUM_MESSAGES - 1}."])
    page.evaluate(WATCH_PAINTS)
    page.focus("#composer")
    page.keyboard.type(_prose(NUM_LETTERS)[:NUM_LETTERS], delay=30)
    paint_ms = statistics.quantiles(page.evaluate("paintsMs"), n=20)[-1]
    context.close()
    return [
        compare(f"{NUM_MESSAGES} messages: open", open_ms, "ms", MAX_OPEN_MS, "goal", "<= 1.00"),
        compare(f"{NUM_MESSAGES} messages: key to paint, p95", paint_ms, "ms", MAX_PAINT_MS, "goal", "<= 1.00"),
    ]


def measure_frames(browser: Any, url: str, script: Script, slowdown: int) -> Figure:
    """Measure frames, or updates of the text with a slower processor, while FRAME_DELTAS_PER_S arrive."""
    script.deltas, script.deltas_per_s = deltas("mixed", FRAME_DELTAS_PER_S * (FRAME_SECONDS + 2)), FRAME_DELTAS_PER_S
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(".dot-on")
    context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
    page.fill("#composer", "Go")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .prose:not(:empty)")
    frames, updates = page.evaluate(COUNT_FRAMES, FRAME_SECONDS)
    context.close()
    if slowdown > 1:
        label = f"text updates, processor {slowdown} times slower"
        return compare(label, updates, "1/s", MIN_SLOW_UPDATES, "goal", ">= 1.00")
    return compare(f"frames while {FRAME_DELTAS_PER_S} tokens/s arrive", frames, "1/s", MIN_FRAMES, "goal", ">= 0.98")


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
    parser.add_argument("--text", choices=[*TEXTS, "all", "none"], default="all")
    options = parser.parse_args()
    script = Script()
    command = [sys.executable, "-m", "chatcache", "serve"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(command, Path(folder), cwd=Path.cwd()) as (real_url, _),
        scripted(script) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        figures = measure_load(browser, url) + measure_long_chat(browser, real_url)
        figures += [measure_frames(browser, url, script, slowdown) for slowdown in (1, 4)]
        for kind in TEXTS if options.text == "all" else [text for text in TEXTS if text == options.text]:
            figures += measure_answer(browser, url, script, kind, options.deltas, options.per_second)
        browser.close()
    print(figure_table(figures))


if __name__ == "__main__":
    main()
