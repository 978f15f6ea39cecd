import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { StoredItem } from "../src/api/frames";
import { autoTitle, DEFAULT_SAMPLING, sampling, systemPrompt } from "../src/app/settings";
import { Chat } from "../src/chat/chat";
import { type FakeServer, FakeSocket, fakeNetwork } from "./fakes";

const CONV = "/v1/conversations/conv_1";
let server: FakeServer;
let chat: Chat;

beforeEach(async () => {
  server = fakeNetwork();
  sampling.value = DEFAULT_SAMPLING;
  systemPrompt.value = "";
  autoTitle.value = false;
  server.replies["/v1/conversations"] = { data: [], has_more: false, next: null };
  store([user("msg_u1", null, "One"), answer("msg_a1", "msg_u1", "first", "resp_1")], "msg_a1", 2);
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
});
afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

const push = (frame: object) => FakeSocket.last.push(frame);
const sent = (type: string) => FakeSocket.last.sent.filter((frame) => frame.type === type);
const texts = () => chat.thread.value.tree.value.path.value.map((message) => message.text.value);
const loads = () => server.calls.filter((call) => call.path === `${CONV}/items`).length;

function item(id: string, role: string, parent_id: string | null, text: string): StoredItem {
  return {
    id,
    role,
    parent_id,
    status: "completed",
    content: [{ type: "text", text }],
    response_id: null,
    index: null,
    num_tokens: 1,
    finish_reason: null,
    created_at: 0,
  };
}
const user = (id: string, parent: string | null, text: string) => item(id, "user", parent, text);
const answer = (id: string, parent: string, text: string, response_id: string, index = 0): StoredItem => ({
  ...item(id, "assistant", parent, text),
  response_id,
  index,
  finish_reason: "stop",
});
const head = (rev: number, active_leaf: string) => ({
  id: "conv_1",
  title: "One",
  created_at: 1,
  updated_at: rev,
  active_leaf,
  rev,
  metadata: {},
});

/** Set the stored conversation. */
function store(items: readonly StoredItem[], leaf: string, rev: number): void {
  server.replies[CONV] = head(rev, leaf);
  server.replies[`${CONV}/items`] = { data: items };
}

/** Notify the page of a change made elsewhere. */
async function notify(rev: number, leaf: string, running: readonly string[] = []): Promise<void> {
  push({ type: "conversation.updated", conversation: head(rev, leaf), running });
  await vi.advanceTimersByTimeAsync(100);
}

async function openConversation(running: readonly string[] = []): Promise<void> {
  push({
    type: "conversation.subscribed",
    running: running.map((response_id) => ({ response_id, conversation_id: "conv_1" })),
  });
  await chat.open("conv_1");
  await vi.advanceTimersByTimeAsync(100);
}

const FIRST = [user("msg_u1", null, "One"), answer("msg_a1", "msg_u1", "first", "resp_1")];

describe("LiveSync", () => {
  it("shows a message sent in another tab and streams its answer from the start", async () => {
    await openConversation();
    const kept = chat.thread.value.tree.value.byId("msg_a1")!;
    store([...FIRST, user("msg_u2", "msg_a1", "Two")], "msg_u2", 3);
    await notify(3, "msg_u2", ["resp_2"]);
    expect(texts()).toEqual(["One", "first", "Two"]);
    expect(chat.thread.value.tree.value.byId("msg_a1")).toBe(kept); // shown messages keep their objects
    const [resume] = sent("response.resume");
    expect(resume).toMatchObject({ response_id: "resp_2", starting_after: -1 });
    const stream_id = resume!.stream_id;
    const response = {
      id: "resp_2",
      status: "in_progress",
      conversation: { id: "conv_1" },
      parent_item_id: "msg_u2",
      n: 1,
    };
    push({ type: "response.resumed", response_id: "resp_2", stream_id });
    push({ type: "response.created", sequence_number: 0, response, stream_id });
    expect(chat.live.value).not.toBeNull();
    push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a2" }, stream_id });
    push({ type: "response.output_text.delta", output_index: 0, delta: "sec", stream_id });
    await vi.advanceTimersByTimeAsync(20);
    expect(texts()).toEqual(["One", "first", "Two", "sec"]);
    const before = loads();
    push({ type: "response.output_text.done", output_index: 0, text: "second", stream_id });
    push({ type: "conversation.updated", conversation: head(4, "msg_a2"), stream_id });
    push({ type: "response.completed", response: { ...response, status: "completed" }, stream_id });
    await notify(4, "msg_a2");
    expect(texts()).toEqual(["One", "first", "Two", "second"]);
    expect(chat.live.value).toBeNull();
    expect(loads()).toBe(before); // it was streamed: no reload
  });

  it("resumes all candidates below their message after a reload", async () => {
    store([...FIRST, user("msg_u2", "msg_a1", "Two")], "msg_u2", 3);
    await openConversation(["resp_2"]);
    const stream_id = sent("response.resume")[0]!.stream_id;
    const response = {
      id: "resp_2",
      status: "in_progress",
      conversation: { id: "conv_1" },
      parent_item_id: "msg_u2",
      n: 2,
    };
    expect(chat.thread.value.awaitingServer.value).toBe(true); // the "No answer is stored" note stays hidden
    push({ type: "response.created", sequence_number: 0, response, stream_id });
    const outputs = ["a", "b"].map((text, at) => ({ item_id: `msg_${text}`, output_index: at, type: "message", text }));
    push({ type: "response.snapshot", sequence_number: 9, outputs, stream_id });
    const turn = chat.live.value!;
    expect(turn.candidates.map((message) => message.text.value)).toEqual(["a", "b"]);
    expect(chat.thread.value.tree.value.get(turn.candidates[0]!.parent!)!.id.value).toBe("msg_u2");
  });

  it("does not reload after its own changes", async () => {
    await openConversation();
    const before = loads();
    server.replies[CONV] = { ...head(3, "msg_a1"), title: "Mine" };
    const slow = (url: URL, init: RequestInit) =>
      new Promise((go) => setTimeout(go, 400)).then(() => server.fetch(url, init));
    vi.stubGlobal("fetch", slow);
    const renamed = chat.conversations.rename("conv_1", "Mine");
    await notify(3, "msg_a1"); // the notification arrives before the response
    await vi.advanceTimersByTimeAsync(2000);
    await renamed;
    expect(loads()).toBe(before);
  });

  it.each(["accepted", "refused"])("shows a message once that it reads before it is %s", async (ending) => {
    await openConversation();
    const slow = (url: URL, init: RequestInit) =>
      new Promise((go) => setTimeout(go, 200)).then(() => server.fetch(url, init));
    vi.stubGlobal("fetch", slow);
    await notify(3, "msg_a1"); // a change made elsewhere is read
    chat.send("Two");
    const running = {
      ...answer("msg_a2", "msg_u2", "", "resp_2"),
      status: "in_progress",
      finish_reason: null,
    } as const;
    if (ending === "accepted") store([...FIRST, user("msg_u2", "msg_a1", "Two"), running], "msg_u2", 4);
    else store([...FIRST, answer("msg_b1", "msg_u1", "other", "resp_b")], "msg_a1", 3);
    await vi.advanceTimersByTimeAsync(1000);
    const stream_id = sent("response.create")[0]!.stream_id;
    if (ending === "accepted") {
      const input_item_ids = ["msg_u2"];
      const response = { id: "resp_2", status: "in_progress", conversation: { id: "conv_1" }, input_item_ids };
      push({ type: "response.created", response, stream_id });
    } else push({ type: "error", status: 400, error: { code: "x", message: "No", param: null }, stream_id });
    await vi.advanceTimersByTimeAsync(1000);
    const tree = chat.thread.value.tree.value;
    const [question, ...others] = tree.childrenOf(tree.byId("msg_a1")!.key);
    expect([question!.text.value, others, tree.childrenOf(question!.key).length]).toEqual(["Two", [], 1]);
    expect(tree.byId("msg_b1") !== undefined).toBe(ending === "refused"); // the change is read afterwards
  });

  it("marks an answer as unsaved until it is stored", async () => {
    await openConversation();
    chat.send("Two");
    const stream_id = sent("response.create")[0]!.stream_id;
    const response = {
      id: "resp_2",
      status: "in_progress",
      conversation: { id: "conv_1" },
      input_item_ids: ["msg_u2"],
    };
    push({ type: "response.created", response, stream_id });
    push({ type: "conversation.updated", conversation: head(3, "msg_u2"), stream_id });
    push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a2" }, stream_id });
    push({ type: "response.output_text.done", output_index: 0, text: "second", stream_id });
    push({ type: "response.completed", response: { ...response, status: "completed" }, saved: false, stream_id });
    const turn = () => chat.thread.value.turnOf(chat.thread.value.tree.value.leaf.value!)!;
    expect(turn().unsaved.value).toBe(true);
    const asked = [...FIRST, user("msg_u2", "msg_a1", "Two")];
    store(asked, "msg_u2", 4);
    await notify(4, "msg_u2"); // an unrelated change
    expect([texts().at(-1), turn().unsaved.value]).toEqual(["second", true]);
    store([...asked, answer("msg_a2", "msg_u2", "second", "resp_2")], "msg_a2", 5);
    await notify(5, "msg_a2");
    expect([texts().at(-1), turn().unsaved.value]).toEqual(["second", false]);
  });

  it("does not switch the branch if the user is on another one", async () => {
    const both = [...FIRST, answer("msg_b1", "msg_u1", "other", "resp_b")];
    store(both, "msg_b1", 3);
    await openConversation();
    expect(texts()).toEqual(["One", "other"]);
    chat.thread.value.tree.value.choose(chat.thread.value.tree.value.byId("msg_a1")!);
    store([...both, user("msg_u2", "msg_b1", "Go on")], "msg_u2", 4);
    await notify(4, "msg_u2");
    expect(texts()).toEqual(["One", "first"]);
  });

  it("keeps following the active branch through a reload in the middle of an answer", async () => {
    await openConversation();
    const one = [user("msg_u1", null, "One"), answer("msg_a1", "msg_u1", "first", "resp_1")];
    store(one, "msg_u1", 3); // regenerated elsewhere: the branch ends at the user message while the answer is streaming
    await notify(3, "msg_u1");
    expect(texts()).toEqual(["One", "first"]);
    store([...one, answer("msg_a2", "msg_u1", "second", "resp_2")], "msg_a2", 4);
    await notify(4, "msg_a2");
    expect(texts()).toEqual(["One", "second"]);
  });

  it("removes messages deleted elsewhere and keeps unsent ones", async () => {
    store([...FIRST, user("msg_u2", "msg_a1", "Two")], "msg_u2", 3);
    await openConversation();
    const tree = chat.thread.value.tree.value;
    tree.add({ key: "unsent", parent: tree.byId("msg_a1")!.key, role: "user", text: "Never sent" }, false);
    store(FIRST, "msg_a1", 4);
    await notify(4, "msg_a1");
    expect(tree.byId("msg_u2")).toBeUndefined();
    expect(tree.get("unsent")?.text.value).toBe("Never sent");
    expect(chat.thread.value.tree.value).toBe(tree);
  });

  it("loads changes made while disconnected", async () => {
    await openConversation();
    FakeSocket.last.close();
    store([...FIRST, user("msg_u2", "msg_a1", "Two"), answer("msg_a2", "msg_u2", "second", "resp_2")], "msg_a2", 5);
    await vi.advanceTimersByTimeAsync(20_000);
    FakeSocket.last.open();
    expect(sent("conversation.subscribe").length).toBe(1);
    push({ type: "conversation.subscribed", running: [] });
    await vi.advanceTimersByTimeAsync(100);
    expect(texts()).toEqual(["One", "first", "Two", "second"]);
  });

  it("reads again what runs and what has changed if it has missed changes", async () => {
    await openConversation();
    const other = { ...head(1, "msg_x"), id: "conv_2" };
    push({ type: "conversation.updated", conversation: other, running: ["resp_x"] });
    store([...FIRST, user("msg_u2", "msg_a1", "Two"), answer("msg_a2", "msg_u2", "second", "resp_2")], "msg_a2", 5);
    server.replies["/v1/conversations"] = { data: [{ ...other, title: "New", rev: 2 }], has_more: false, next: null };
    push({ type: "conversation.missed", running: [] });
    await vi.advanceTimersByTimeAsync(100);
    expect(texts()).toEqual(["One", "first", "Two", "second"]);
    expect([chat.isLive("conv_2"), chat.conversations.find("conv_2")!.title]).toEqual([false, "New"]);
  });

  it("reports responses running elsewhere and marks unseen answers", async () => {
    await openConversation();
    const other = { ...head(1, "msg_x"), id: "conv_2" };
    push({ type: "conversation.updated", conversation: other, running: ["resp_x"] });
    expect(chat.isLive("conv_2")).toBe(true);
    push({ type: "conversation.updated", conversation: { ...other, rev: 2 }, running: [] });
    expect([chat.isLive("conv_2"), chat.conversations.isUnseen("conv_2")]).toEqual([false, true]);
    void chat.open("conv_2");
    expect(chat.conversations.isUnseen("conv_2")).toBe(false);
    push({ type: "conversation.deleted", conversation_id: "conv_2" });
    expect(chat.conversations.find("conv_2")).toBeUndefined();
    expect(chat.thread.value.id.value).toBeNull();
  });
});

describe("automatic titles", () => {
  const title = `${CONV}/title`;

  /** Start a conversation with its first answer; `during` runs while the answer is streaming. */
  async function begin(during: () => void = () => {}): Promise<void> {
    autoTitle.value = true;
    chat.send("One");
    const stream_id = FakeSocket.last.sent.at(-1)!.stream_id;
    const response = {
      id: "resp_1",
      status: "in_progress",
      conversation: { id: "conv_1" },
      input_item_ids: ["msg_u1"],
    };
    push({ type: "response.created", response, stream_id });
    push({ type: "conversation.updated", conversation: head(1, "msg_u1"), stream_id });
    during();
    push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a1" }, stream_id });
    push({ type: "response.output_text.done", output_index: 0, text: "first", stream_id });
    push({ type: "conversation.updated", conversation: { ...chat.conversations.find("conv_1"), rev: 5 }, stream_id });
    push({ type: "response.completed", response: { ...response, status: "completed" }, stream_id });
    await vi.advanceTimersByTimeAsync(0);
  }

  it("are generated once, after the first answer", async () => {
    server.replies[title] = { conversation: { ...head(6, "msg_a1"), title: "By the model" } };
    await begin();
    expect(server.calls.find((call) => call.path === title)?.body).toEqual({ rev: 5 });
    expect(chat.conversations.find("conv_1")?.title).toBe("By the model");
  });

  it("are not generated if the title changed during the answer", async () => {
    await begin(() => {
      push({
        type: "conversation.updated",
        conversation: { ...head(2, "msg_u1"), title: "Mine" },
        running: ["resp_1"],
      });
    });
    expect(server.calls.some((call) => call.path === title)).toBe(false);
  });

  it("are not retried if the title changed during the request", async () => {
    server.statuses[title] = 409;
    server.replies[title] = { error: { message: "stale", conversation: { ...head(7, "msg_a1"), title: "Mine" } } };
    await begin();
    expect(server.calls.filter((call) => call.path === title).length).toBe(1);
  });

  it("are retried with the new revision if something else changed", async () => {
    server.statuses[title] = 409;
    server.replies[title] = { error: { message: "stale", conversation: head(7, "msg_a1") } };
    await begin();
    const revs = server.calls.filter((call) => call.path === title).map((call) => (call.body as { rev: number }).rev);
    expect(revs).toEqual([5, 7, 7]);
  });
});
