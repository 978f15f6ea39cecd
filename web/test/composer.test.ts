// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { toasts } from "../src/app/notifications";
import type { Attachment } from "../src/chat/attachments";
import { Chat } from "../src/chat/chat";
import { ChatContext } from "../src/ui/context";
import { FakeSocket, fakeNetwork } from "./fakes";

const MAX_TOKENS = 64;
const FILE: Attachment = {
  name: "a.txt",
  bytes: 1,
  state: "ready",
  pasted: null,
  block: "",
  tokens: 1,
  pages: null,
  cachedTokens: 0,
  error: "",
};
const FULL = "This chat is full. Start a new chat, or edit an earlier message.";

let chat: Chat;
let touch: boolean;

const area = () => document.querySelector<HTMLTextAreaElement>("#composer")!;
const send = () => document.querySelector<HTMLButtonElement>("[aria-label=Send]")!;
const creates = () =>
  FakeSocket.last.sent.filter((frame) => frame.type === "response.create" && frame.generate !== false);
const settle = () => vi.advanceTimersByTimeAsync(50);

async function show(): Promise<void> {
  const { Composer } = await import("../src/ui/Composer");
  const { Ending } = await import("../src/ui/thread/MessageParts");
  const leaf = chat.thread.value.tree.value.leaf.value;
  const ending = leaf && h(Ending, { message: leaf, alone: true });
  render(h(ChatContext.Provider, { value: chat }, ending, h(Composer, {})), document.body);
  await settle();
}

function answer(inputTokens: number): void {
  chat.send("Hello");
  const push = (frame: object) => FakeSocket.last.push({ stream_id: creates().at(-1)!.stream_id, ...frame });
  const response = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" }, input_item_ids: ["msg_u"] };
  const usage = { input_tokens: inputTokens, output_tokens: 10, input_tokens_details: { cached_tokens: 0 } };
  push({ type: "response.created", response });
  push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a" } });
  push({ type: "response.output_text.done", output_index: 0, text: "Hi" });
  push({ type: "response.output_item.done", output_index: 0, item: { id: "msg_a", finish_reason: "length" } });
  push({ type: "response.completed", response: { ...response, status: "incomplete", usage } });
}

async function write(text: string): Promise<void> {
  area().value = text;
  area().dispatchEvent(new InputEvent("input", { bubbles: true }));
  await settle();
}

function pressEnter(at: HTMLElement): boolean {
  return at.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
}

beforeEach(() => {
  fakeNetwork();
  touch = false;
  vi.stubGlobal("matchMedia", (query: string) => ({ matches: touch && query === "(pointer: coarse)" }));
  toasts.value = [];
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
  const limits = { max_frame_bytes: 1 << 20, max_n: 8, max_beam_width: 8, max_lanes: 8, max_frames_per_s: 100 };
  FakeSocket.last.push({ type: "session.created", session: { model: "m", max_model_len: MAX_TOKENS, limits } });
});
afterEach(() => {
  render(null, document.body);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

describe("a chat that fills the context", () => {
  test("Composer says what to do, and Continue is not offered", async () => {
    answer(MAX_TOKENS - 10);
    await show();
    await write("More");
    expect(document.querySelector(".full-notice span")?.textContent).toBe(FULL);
    expect([send().disabled, send().title]).toEqual([true, FULL]);
    chat.thread.value.attachments.value = [FILE];
    expect(document.querySelector(".ending")?.textContent).not.toContain("Continue");
    document.querySelector<HTMLButtonElement>(".full-notice button")!.click();
    await settle();
    expect([document.querySelector(".full-notice"), chat.thread.value.tree.value.size]).toEqual([null, 0]);
    expect([area().value, chat.thread.value.attachments.value], "the message moves along").toEqual(["More", [FILE]]);
  });

  test("Composer sends, and Continue is offered, while one token is free", async () => {
    answer(MAX_TOKENS - 11);
    await show();
    await write("More");
    expect(document.querySelector(".full-notice")).toBeNull();
    expect([send().disabled, send().title]).toEqual([false, "Send (Enter)"]);
    expect(document.querySelector(".ending")?.textContent).toContain("Continue");
  });
});

describe("the Return key", () => {
  test.each([
    [false, "send", 1],
    [true, "enter", 0],
  ])("with touch %s, Composer shows the key as %s and sends %d messages", async (isTouch, hint, count) => {
    touch = isTouch;
    await show();
    await write("Hello");
    expect(area().getAttribute("enterkeyhint")).toBe(hint);
    expect(pressEnter(area()), "a new line is inserted").toBe(isTouch);
    expect(creates().length).toBe(count);
    if (count === 0) send().click();
    expect(creates().length).toBe(1);
  });

  test.each([true, false])("with touch %s, MessageEditor inserts a new line only there", async (isTouch) => {
    touch = isTouch;
    const { MessageEditor } = await import("../src/ui/thread/MessageEditor");
    const message = chat.thread.value.tree.value.add({ key: "u", parent: null, role: "user", text: "a" });
    const run = vi.fn();
    const props = { message, label: "Edit", text: "a", hint: "", actions: [{ label: "Send", run }], onClose: () => {} };
    render(h(ChatContext.Provider, { value: chat }, h(MessageEditor, props)), document.body);
    expect(pressEnter(document.querySelector("textarea")!)).toBe(isTouch);
    expect(run.mock.calls.length).toBe(isTouch ? 0 : 1);
  });
});
