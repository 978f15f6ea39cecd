// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, expect, it, test, vi } from "vitest";
import { Chat } from "../src/chat/chat";
import layout from "../src/styles/layout.css?raw";
import { Banner } from "../src/ui/Banner";
import { ChatContext } from "../src/ui/context";
import { fakeNetwork } from "./fakes";

beforeEach(() => {
  fakeNetwork();
});
afterEach(() => {
  render(null, document.body);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

test.each([
  [0, null],
  [0.4, "0.4"],
  [0.95, null], // the server is warming up
])("loading with the progress %f has a bar with the value %s", (progress, value) => {
  const chat = new Chat("ws://test/v1/responses");
  chat.readiness.status.value = { phase: "loading", detail: "", progress };
  render(h(ChatContext.Provider, { value: chat }, h(Banner, {})), document.body);
  expect(document.querySelector("progress")!.getAttribute("value")).toBe(value);
});

it("a bar without a value has a visible fill", () => {
  const rule = /^progress:indeterminate \{([^}]*)\}/m.exec(layout)?.[1];
  expect(rule).toMatch(/background: .*var\(--cached-fill\)/);
  // otherwise the track of the browser is drawn over it
  expect(layout).toMatch(/^progress:indeterminate::-webkit-progress-bar \{\s*background: none;/m);
  expect(layout).toMatch(/^progress:indeterminate::-moz-progress-bar \{\s*background: none;/m);
});
