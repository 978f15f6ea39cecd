import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { dismiss, runAction, toasts, UNDO_MS } from "../src/app/notifications";
import { DEFAULT_SAMPLING, sampling, setSampling, systemPrompt } from "../src/app/settings";
import { Chat } from "../src/chat/chat";
import { type FakeServer, FakeSocket, fakeNetwork } from "./fakes";

let server: FakeServer;
let chat: Chat;

const HEAD = { id: "conv_1", title: "T", created_at: 1, updated_at: 1, active_leaf: "d", rev: 5, metadata: {} };
const item = (id: string, parent: string | null, role: string) => ({
  id,
  role,
  status: "completed",
  content: [{ type: "text", text: id }],
  parent_id: parent,
  response_id: null,
  index: 0,
  num_tokens: null,
  finish_reason: null,
  created_at: 1,
});
const A = item("a", null, "user");
const ITEMS = [A, item("b", "a", "assistant"), item("c", "b", "user"), item("d", "c", "assistant")];

beforeEach(async () => {
  server = fakeNetwork();
  sampling.value = DEFAULT_SAMPLING;
  systemPrompt.value = "";
  server.replies["/v1/conversations/conv_1"] = HEAD;
  server.replies["/v1/conversations/conv_1/items"] = { data: ITEMS };
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
  await chat.open("conv_1");
});
afterEach(() => {
  toasts.value = [];
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

const texts = () => chat.thread.value.tree.value.path.value.map((message) => message.text.value);
const message = (id: string) => chat.thread.value.tree.value.byId(id)!;
const deletions = () => server.calls.filter(({ method }) => method === "DELETE").map(({ path }) => path);
const created = () => FakeSocket.last.sent.filter(({ type }) => type === "response.create");
const idle = () => vi.advanceTimersByTimeAsync(1);

describe("saving a version", () => {
  const stored = () => server.calls.filter(({ method }) => method === "POST").map(({ path }) => path);

  it("stores nothing without a change", async () => {
    await chat.edits.saveVersion(message("b"), "b");
    expect(stored()).toEqual([]);
  });

  it("stores a changed text", async () => {
    await chat.edits.saveVersion(message("b"), "b and more");
    expect(stored()).toEqual(["/v1/conversations/conv_1/items"]);
  });
});

describe("deleting a message", () => {
  it("hides it, keeps what followed it, and deletes it after the undo period", async () => {
    chat.edits.remove(message("b"));
    expect(texts()).toEqual(["a", "c", "d"]);
    await vi.advanceTimersByTimeAsync(UNDO_MS - 100);
    expect(deletions()).toEqual([]);
    server.replies["/v1/conversations/conv_1/items/b"] = { ...HEAD, rev: 6 };
    server.replies["/v1/conversations/conv_1/items"] = { data: [A, item("c", "a", "user"), ITEMS[3]] };
    await vi.advanceTimersByTimeAsync(200);
    expect(deletions()).toEqual(["/v1/conversations/conv_1/items/b"]);
    expect(texts()).toEqual(["a", "c", "d"]);
  });

  it("is undone by the toast", async () => {
    chat.edits.remove(message("b"));
    runAction(toasts.value[0]!);
    expect([texts(), toasts.value]).toEqual([["a", "b", "c", "d"], []]);
    await vi.advanceTimersByTimeAsync(2 * UNDO_MS);
    expect(deletions()).toEqual([]);
  });

  it("can be undone while the user points at the toast, or has the focus in it", async () => {
    const held = vi.spyOn(document, "querySelector").mockReturnValue({} as Element);
    chat.edits.remove(message("b"));
    await vi.advanceTimersByTimeAsync(5 * UNDO_MS);
    expect([toasts.value.length, deletions()]).toEqual([1, []]);
    held.mockReturnValue(null);
    await vi.advanceTimersByTimeAsync(2000);
    expect([toasts.value.length, deletions().length]).toEqual([0, 1]);
  });

  it("is final when the toast is dismissed", async () => {
    chat.edits.remove(message("b"));
    dismiss(toasts.value[0]!.id);
    await idle();
    expect(deletions()).toHaveLength(1);
  });

  it("stays hidden when the conversation is read again before it is deleted", async () => {
    chat.edits.remove(message("b"));
    chat.thread.value.load(ITEMS, { ...HEAD, rev: 6 });
    expect(texts()).toEqual(["a", "c", "d"]);
    toasts.value[0]!.action!.run();
    expect(texts()).toEqual(["a", "b", "c", "d"]);
  });

  it("is finished before the next message is sent", async () => {
    chat.edits.remove(message("b"));
    server.replies["/v1/conversations/conv_1/items/b"] = { ...HEAD, rev: 6 };
    server.replies["/v1/conversations/conv_1/items"] = { data: [A, item("c", "a", "user"), ITEMS[3]] };
    chat.send("next");
    expect([created().length, chat.live.value !== null]).toEqual([0, true]);
    await idle();
    expect(deletions()).toHaveLength(1);
    expect(created()).toHaveLength(1);
    expect(created()[0]).toMatchObject({ previous_item_id: "d", input: [{ role: "user", content: "next" }] });
    expect(toasts.value).toEqual([]);
  });

  it("shows the message again if the server refuses", async () => {
    chat.edits.remove(message("b"));
    server.statuses["/v1/conversations/conv_1/items/b"] = 409;
    await vi.advanceTimersByTimeAsync(UNDO_MS + 10);
    expect(texts()).toEqual(["a", "b", "c", "d"]);
    expect(toasts.value.at(-1)!.text).toMatch(/^Not deleted/);
  });
});

describe("another version of an answer", () => {
  it("is stored next to the old one and shown", async () => {
    const stored = item("b2", "a", "assistant");
    server.replies["/v1/conversations/conv_1/items"] = { data: [...ITEMS, stored] };
    const saving = chat.edits.saveVersion(message("b"), "better");
    await idle();
    await saving;
    const call = server.calls.find(({ method }) => method === "POST")!;
    expect(call.body).toEqual({ items: [{ role: "assistant", content: "better" }], parent_id: "a" });
    expect(texts()).toEqual(["a", "b2"]);
  });
});

describe("the beginning of an answer", () => {
  it("is sent as the last message of the input", () => {
    chat.answerFrom(message("c"), "Well,");
    expect(created()[0]).toMatchObject({
      previous_item_id: "c",
      input: [{ role: "assistant", content: "Well," }],
      continue_final_message: true,
    });
    expect(created()[0]).not.toHaveProperty("n");
  });

  it("is that of the settings for every message", () => {
    setSampling({ replyStart: "Sure:" });
    chat.send("next");
    expect(created()[0]!.input).toEqual([
      { role: "user", content: "next" },
      { role: "assistant", content: "Sure:" },
    ]);
  });

  it("is the text of an answer that is continued without stored tokens", async () => {
    await chat.forks.continueAnswer(message("d"));
    expect(created()[0]).toMatchObject({ previous_item_id: "c", input: [{ role: "assistant", content: "d" }] });
  });
});
