// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, expect, it, vi } from "vitest";
import { toasts } from "../src/app/notifications";
import { type Attachment, joinMessage } from "../src/chat/attachments";
import { Chat } from "../src/chat/chat";
import { QUESTION_EDITOR } from "../src/chat/drafts";
import type { Message } from "../src/chat/tree";
import attachmentStyles from "../src/ui/attachments.css?raw";
import { ChatContext } from "../src/ui/context";
import threadStyles from "../src/ui/thread/thread.css?raw";
import { FakeSocket, fakeNetwork } from "./fakes";

afterEach(() => {
  localStorage.clear();
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

let chat: Chat;

/** Show a question on the page. `sentWith`: files that this page sent with it. */
async function showQuestion(text = "What is 2 + 3?", sentWith: readonly Attachment[] = []): Promise<Message> {
  fakeNetwork();
  vi.stubGlobal("matchMedia", () => ({ matches: false }));
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
  const message = chat.thread.value.tree.value.add({ key: "u", id: "msg_u", parent: null, role: "user", text });
  if (sentWith.length > 0) chat.attachments.markSent(message, sentWith);
  await draw(message);
  return message;
}

async function draw(message: Message): Promise<void> {
  const { UserMessage } = await import("../src/ui/thread/UserMessage");
  render(h(ChatContext.Provider, { value: chat }, h(UserMessage, { message })), document.body);
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

async function open(): Promise<HTMLTextAreaElement> {
  document.querySelector<HTMLButtonElement>(".tool-edit")!.click();
  await vi.advanceTimersByTimeAsync(50);
  return document.querySelector("textarea")!;
}

function write(text: string): void {
  const area = document.querySelector("textarea")!;
  area.value = text;
  area.dispatchEvent(new Event("input", { bubbles: true }));
}

it("Editor keeps a changed text that was left with Escape, not one that was cancelled", async () => {
  await showQuestion();
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

it("Editor keeps a changed text when another conversation is shown, or the page is left", async () => {
  const message = await showQuestion();
  await open();
  write("What is 2 + 4?");
  render(null, document.body);
  await draw(message);
  expect((await open()).value).toBe("What is 2 + 4?");
  dispatchEvent(new Event("pagehide"));
  const reloaded = new Chat("ws://test/v1/responses").unsent.drafts;
  expect(reloaded.editOf(message, QUESTION_EDITOR)).toBe("What is 2 + 4?");
  write(message.text.value);
  expect(chat.unsent.drafts.editOf(message, QUESTION_EDITOR)).toBeUndefined();
});

it("Editor stays open while an answer is written, and sends after it", async () => {
  await showQuestion();
  await open();
  write("What is 2 + 4?");
  chat.send("Thank you");
  const press = () =>
    document.querySelector("textarea")!.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  press();
  await vi.advanceTimersByTimeAsync(50);
  expect(document.querySelector("textarea")!.value).toBe("What is 2 + 4?");
  expect(toasts.value.at(-1)!.text).toBe("An answer is being written.");
  const { stream_id } = FakeSocket.last.sent.at(-1)!;
  const response = { id: "resp_1", status: "completed", conversation: { id: "conv_1" } };
  FakeSocket.last.push({ type: "response.completed", stream_id, response });
  press();
  await vi.advanceTimersByTimeAsync(50);
  expect(document.querySelector("textarea")).toBeNull();
  expect(FakeSocket.last.sent.at(-1)).toMatchObject({ input: [{ content: "What is 2 + 4?" }] });
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
