import { signal } from "@preact/signals";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { Message } from "../src/chat/tree";
import { ThreadScroll } from "../src/ui/thread/threadScroll";
import { fakeBrowser } from "./fakes";

const SCREEN_PX = 500;

/** A scroll container with a content height that clamps the scroll position like a browser. */
class Box extends EventTarget {
  readonly clientHeight = SCREEN_PX;
  private topPx = 0;

  constructor(public scrollHeight: number) {
    super();
  }

  get scrollTop() {
    return this.topPx;
  }

  set scrollTop(px: number) {
    this.topPx = Math.max(0, Math.min(px, this.scrollHeight - SCREEN_PX));
  }

  becomes(heightPx: number) {
    this.scrollHeight = heightPx;
    this.scrollTop = this.topPx;
  }

  get belowPx() {
    return this.scrollHeight - this.topPx - SCREEN_PX;
  }
}

beforeEach(() => {
  fakeBrowser();
  vi.stubGlobal(
    "ResizeObserver",
    class {
      observe() {}
      disconnect() {}
    },
  );
});
afterEach(() => vi.unstubAllGlobals());

function atTheEnd() {
  const box = new Box(9000);
  const scroll = new ThreadScroll();
  scroll.attach(box as unknown as HTMLElement, new EventTarget() as HTMLElement);
  scroll.slots([{ key: "a", text: signal("a") } as unknown as Message]);
  scroll.restorePosition();
  scroll.onScroll();
  expect(box.belowPx).toBe(0);
  return { box, scroll };
}

describe("ThreadScroll at the end", () => {
  it("stays at the end when rows shrink and grow before the scroll event", () => {
    const { box, scroll } = atTheEnd();
    box.becomes(4000);
    box.becomes(9100);
    expect(box.belowPx).toBe(5100);
    scroll.onScroll();
    expect([box.belowPx, scroll.pinned.value]).toEqual([0, true]);
  });

  it("stops following when the user scrolls while rows grow", () => {
    const { box, scroll } = atTheEnd();
    box.dispatchEvent(new Event("wheel"));
    box.scrollTop -= 240;
    box.becomes(9100);
    scroll.onScroll();
    expect([box.belowPx, scroll.pinned.value]).toEqual([340, false]);
  });

  it("follows a new answer although the user has just scrolled up", () => {
    const { box, scroll } = atTheEnd();
    box.dispatchEvent(new Event("wheel"));
    box.scrollTop -= 240;
    scroll.onScroll();
    expect(scroll.pinned.value).toBe(false);
    scroll.scrollToEnd(); // a message is sent
    scroll.onScroll();
    box.becomes(8000);
    box.becomes(9100);
    scroll.onScroll();
    expect([box.belowPx, scroll.pinned.value]).toEqual([0, true]);
  });

  it("does not take its own scrolling for that of the user", () => {
    vi.useFakeTimers();
    const { box, scroll } = atTheEnd();
    box.dispatchEvent(new Event("pointerdown")); // on a button of a message
    for (const heightPx of [9100, 9200, 9300]) {
      vi.advanceTimersByTime(600);
      box.becomes(heightPx);
      scroll.restorePosition();
      scroll.onScroll();
    }
    box.becomes(8000);
    box.becomes(9400);
    scroll.onScroll();
    expect([box.belowPx, scroll.pinned.value]).toEqual([0, true]);
    vi.useRealTimers();
  });

  it("stops following when the position changes without an input event", () => {
    const { box, scroll } = atTheEnd();
    box.scrollTop -= 240;
    scroll.onScroll();
    expect([box.belowPx, scroll.pinned.value]).toEqual([240, false]);
  });

  it("follows again when everything fits on the screen", () => {
    const { box, scroll } = atTheEnd();
    box.scrollTop -= 240;
    scroll.onScroll();
    box.becomes(SCREEN_PX);
    scroll.restorePosition();
    expect(scroll.pinned.value).toBe(true);
  });
});
