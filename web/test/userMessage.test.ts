// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, expect, it, vi } from "vitest";
import { Chat } from "../src/chat/chat";
import type { Message } from "../src/chat/tree";
import { ChatContext } from "../src/ui/context";
import { fakeNetwork } from "./fakes";

afterEach(() => {
  render(null, document.body);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

/** Show a question on the page. */
async function showQuestion(): Promise<Message> {
  fakeNetwork();
  vi.stubGlobal("matchMedia", () => ({ matches: false }));
  const { UserMessage } = await import("../src/ui/thread/UserMessage");
  const chat = new Chat("ws://test/v1/responses");
  const message = chat.thread.value.tree.value.add({ key: "u", parent: null, role: "user", text: "What is 2 + 3?" });
  render(h(ChatContext.Provider, { value: chat }, h(UserMessage, { message })), document.body);
  return message;
}

it("Editor sets the caret before the first key press, and only once", async () => {
  const message = await showQuestion();
  document.querySelector<HTMLButtonElement>(".tool-edit")!.click();
  await Promise.resolve();
  const area = document.querySelector("textarea")!;
  expect(document.activeElement).toBe(area);
  expect(area.selectionStart).toBe(message.text.value.length);
  area.select(); // as a user does to replace the text
  await vi.advanceTimersByTimeAsync(500);
  expect([area.selectionStart, area.selectionEnd]).toEqual([0, message.text.value.length]);
});

it("Editor keeps a changed text that was left with Escape, not one that was cancelled", async () => {
  await showQuestion();
  const open = async () => {
    document.querySelector<HTMLButtonElement>(".tool-edit")!.click();
    await vi.advanceTimersByTimeAsync(50);
    return document.querySelector("textarea")!;
  };
  const press = async (area: HTMLElement, key: string) => {
    area.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await vi.advanceTimersByTimeAsync(50);
    expect(document.querySelector("textarea")).toBeNull();
  };
  (await open()).value = "What is 2 + 4?";
  await press(document.querySelector("textarea")!, "Escape");
  const again = await open();
  expect(again.value).toBe("What is 2 + 4?");
  [...document.querySelectorAll("button")].find(({ textContent }) => textContent === "Cancel")!.click();
  await vi.advanceTimersByTimeAsync(50);
  expect((await open()).value).toBe("What is 2 + 3?");
});
