// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, expect, it, vi } from "vitest";
import { type Attachment, joinMessage } from "../src/chat/attachments";
import { Chat } from "../src/chat/chat";
import type { Message } from "../src/chat/tree";
import attachmentStyles from "../src/ui/attachments.css?raw";
import { ChatContext } from "../src/ui/context";
import threadStyles from "../src/ui/thread/thread.css?raw";
import { fakeNetwork } from "./fakes";

afterEach(() => {
  render(null, document.body);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

const NOTES = "File: notes.txt\n```\nBuy milk.\n```\n";
const SENT: Attachment = {
  name: "notes.txt",
  bytes: 9,
  state: "ready",
  pasted: null,
  block: NOTES,
  tokens: 100,
  pages: null,
  cachedTokens: 0,
  error: "",
};

/** Show a question on the page. `sentWith`: files that this page sent with it. */
async function showQuestion(text = "What is 2 + 3?", sentWith: readonly Attachment[] = []): Promise<Message> {
  fakeNetwork();
  vi.stubGlobal("matchMedia", () => ({ matches: false }));
  const { UserMessage } = await import("../src/ui/thread/UserMessage");
  const chat = new Chat("ws://test/v1/responses");
  const message = chat.thread.value.tree.value.add({ key: "u", parent: null, role: "user", text });
  if (sentWith.length > 0) chat.attachments.markSent(message, sentWith);
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

it("a file of a message has the same size before and after a reload", async () => {
  const content = joinMessage([SENT], "What next?");
  const size = () => document.querySelector(".file-card .attachment-cost")!.textContent;
  await showQuestion(content, [SENT]);
  const before = size();
  render(null, document.body);
  await showQuestion(content);
  expect([before, size()]).toEqual(["9 characters", "9 characters"]);
});

it("Editor shows the files that stay with the message", async () => {
  await showQuestion(joinMessage([SENT], "What next?"));
  document.querySelector<HTMLButtonElement>(".tool-edit")!.click();
  await Promise.resolve();
  const editor = document.querySelector(".user-editor")!;
  expect(editor.querySelector("textarea")!.value).toBe("What next?");
  expect([...editor.querySelectorAll(".attachment-name")].map(({ textContent }) => textContent)).toEqual(["notes.txt"]);
});

it("files of a message wrap on a narrow screen instead of reaching beyond it", async () => {
  await showQuestion(joinMessage([SENT], "What next?"));
  const [name, size] = document.querySelector(".file-card .attachment-text")!.children;
  expect([name!.className, size!.className]).toEqual(["attachment-name", "attachment-cost"]);
  const rule = (styles: string, name: string) => new RegExp(`^\\.${name} \\{([^}]*)\\}`, "m").exec(styles)?.[1];
  expect(rule(attachmentStyles, "attachment-text")).toContain("flex-wrap: wrap");
  expect(rule(threadStyles, "user-content")).toContain("grid-template-columns: minmax(0, 1fr)");
});
