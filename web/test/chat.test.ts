import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { autoTitle, DEFAULT_SAMPLING, defaultSystem, parseSchema, sampling, systemPrompt } from "../src/app/settings";
import type { Attachment } from "../src/chat/attachments";
import { Chat } from "../src/chat/chat";
import { QUESTION_EDITOR } from "../src/chat/drafts";
import { requestFields } from "../src/chat/request";
import type { Message } from "../src/chat/tree";
import { type Call, FakeSocket, fakeNetwork } from "./fakes";

let calls: Call[];
let statuses: Record<string, number>;
let replies: Record<string, unknown>;
let chat: Chat;

beforeEach(() => {
  ({ calls, replies, statuses } = fakeNetwork());
  sampling.value = DEFAULT_SAMPLING;
  systemPrompt.value = "";
  autoTitle.value = false;
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
});
afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

const sent = () => FakeSocket.last.sent.at(-1)!;
const streamId = () => sent().stream_id as string;

/** Send the frames of one response with these texts as candidates. */
function reply(texts: readonly string[], name = "1", finish: "completed" | "cancelled" = "completed"): void {
  const stream_id = streamId();
  const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
  const input = sent().input as unknown[];
  const response = { id: `resp_${name}`, status: "in_progress", conversation: { id: "conv_1" } };
  push({ type: "response.created", response: { ...response, input_item_ids: input.length ? [`msg_u${name}`] : [] } });
  push({
    type: "conversation.updated",
    conversation: { id: "conv_1", title: "One", updated_at: 1, rev: 1, metadata: {} },
  });
  push({ type: "response.progress", response_id: response.id, phase: "decode", input_tokens: 40, cached_tokens: 32 });
  for (const i of texts.keys()) {
    push({ type: "response.output_item.added", output_index: i, item: { id: `msg_a${name}${i}` } });
  }
  for (let at = 0; at < Math.max(...texts.map((text) => text.length)); at++) {
    for (const [i, text] of texts.entries()) {
      if (text[at]) push({ type: "response.output_text.delta", output_index: i, delta: text[at] });
    }
  }
  const finish_reason = finish === "completed" ? "stop" : "cancelled";
  texts.forEach((text, i) => {
    push({ type: "response.output_text.done", output_index: i, text });
    push({ type: "response.output_item.done", output_index: i, item: { id: `msg_a${name}${i}`, finish_reason } });
  });
  const usage = { input_tokens: 40, output_tokens: 12, input_tokens_details: { cached_tokens: 32 } };
  const type = finish === "completed" ? "response.completed" : "response.incomplete";
  push({ type, response: { ...response, status: finish, usage } });
}

const texts = () => chat.thread.value.tree.value.path.value.map((message) => message.text.value);
const leaf = () => chat.thread.value.tree.value.leaf.value!;

/** The unsent texts that a reload finds. */
async function storedDrafts(): Promise<unknown> {
  await vi.advanceTimersByTimeAsync(1000);
  return JSON.parse(localStorage.getItem("chatcache.drafts")!);
}

describe("Chat", () => {
  it("stores the text and the usage of a streamed answer", () => {
    chat.send("Hello");
    expect(sent()).toMatchObject({ type: "response.create", input: [{ role: "user", content: "Hello" }] });
    expect(sent()).not.toHaveProperty("previous_item_id");
    reply(["Hi there"]);
    expect(texts()).toEqual(["Hello", "Hi there"]);
    expect(leaf().status.value).toBe("done");
    expect(chat.live.value).toBeNull();
    const turn = chat.thread.value.turnOf(leaf())!;
    expect(turn.usage.value).toEqual({ inputTokens: 40, cachedTokens: 32, outputTokens: 12 });
  });

  it("shows the message and not the reasoning", () => {
    chat.send("Hello");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    const response = { id: "resp_t", status: "in_progress", conversation: { id: "conv_1" } };
    const thought = { id: "rs_t", type: "reasoning", candidate: 0 };
    const answer = { id: "msg_t", type: "message", candidate: 0 };
    push({ type: "response.created", response: { ...response, input_item_ids: ["msg_u"] } });
    push({ type: "response.output_item.added", output_index: 0, item: thought });
    push({ type: "response.reasoning_text.delta", output_index: 0, delta: "Hm" });
    push({ type: "response.output_item.done", output_index: 0, item: thought });
    push({ type: "response.output_item.added", output_index: 1, item: answer });
    push({ type: "response.output_text.delta", output_index: 1, delta: "Hi" });
    push({ type: "response.output_text.done", output_index: 1, text: "Hi" });
    push({ type: "response.output_item.done", output_index: 1, item: { ...answer, finish_reason: "stop" } });
    expect(texts()).toEqual(["Hello", "Hi"]);
    expect(leaf().id.value).toBe("msg_t");
  });

  it("shows the whole text after a snapshot frame", () => {
    chat.send("Hello");
    const push = (frame: object) => FakeSocket.last.push({ stream_id: streamId(), ...frame });
    const response = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" } };
    push({ type: "response.created", response: { ...response, input_item_ids: ["msg_u1"] } });
    const text = "Hi the";
    push({ type: "response.snapshot", outputs: [{ item_id: "msg_a10", output_index: 0, type: "message", text }] });
    push({ type: "response.output_text.delta", output_index: 0, delta: "re" });
    vi.runAllTimers();
    expect(texts()).toEqual(["Hello", "Hi there"]);
    expect(leaf().id.value).toBe("msg_a10");
    push({
      type: "response.snapshot",
      outputs: [{ item_id: "msg_a10", output_index: 0, type: "message", text: "Hi there!" }],
    });
    push({ type: "response.completed", response: { ...response, status: "completed" } });
    expect(texts()).toEqual(["Hello", "Hi there!"]);
    expect(leaf().status.value).toBe("done");
  });

  it("continues after the shown leaf", () => {
    chat.send("One");
    reply(["first"]);
    chat.send("Two");
    expect(sent()).toMatchObject({ previous_item_id: "msg_a10", input: [{ content: "Two" }] });
  });

  it("keeps candidates apart and continues after the picked one", () => {
    sampling.value = { ...DEFAULT_SAMPLING, n: 3 };
    chat.send("Story");
    expect(sent().n).toBe(3);
    reply(["aa", "bbb", "c"]);
    const turn = chat.thread.value.turnOf(leaf())!;
    expect(turn.candidates.map((message) => message.text.value)).toEqual(["aa", "bbb", "c"]);
    chat.pick(turn.candidates[1]!);
    expect(turn.showsCandidates.value).toBe(false);
    expect(calls.at(-1)).toMatchObject({
      method: "POST",
      path: "/v1/conversations/conv_1",
      body: { active_leaf: "msg_a11" },
    });
    chat.send("More");
    expect(sent().previous_item_id).toBe("msg_a11");
  });

  it("stores a pick made while the answers were streaming", () => {
    sampling.value = { ...DEFAULT_SAMPLING, n: 2 };
    chat.send("Story");
    chat.pick(chat.thread.value.turnOf(leaf())!.candidates[1]!);
    reply(["a", "b"]);
    expect(calls.at(-1)).toMatchObject({ body: { active_leaf: "msg_a11" } });
  });

  it("regenerates an answer without sending the user message again", () => {
    chat.send("One");
    reply(["first"]);
    chat.regenerate(leaf());
    expect(sent()).toMatchObject({ previous_item_id: "msg_u1", input: [] });
    reply(["second"], "2");
    expect(texts()).toEqual(["One", "second"]);
    expect(chat.thread.value.tree.value.siblings(leaf()).length).toBe(2);
  });

  it("sends an edited first message as a new root of the same conversation", () => {
    chat.send("One");
    reply(["first"]);
    chat.edit(chat.thread.value.tree.value.path.value[0]!, "Uno");
    expect(sent()).toMatchObject({ conversation: "conv_1", previous_item_id: "root", input: [{ content: "Uno" }] });
    reply(["primo"], "2");
    expect(texts()).toEqual(["Uno", "primo"]);
  });

  it("sends an edited later message as a branch after the previous answer", () => {
    chat.send("One");
    reply(["first"]);
    chat.send("Two");
    reply(["second"], "2");
    chat.edit(chat.thread.value.tree.value.path.value[2]!, "Zwei");
    expect(sent()).toMatchObject({ previous_item_id: "msg_a10", input: [{ content: "Zwei" }] });
  });

  it("cancels the response by id, also if stop was requested before the id arrived", () => {
    chat.send("Long");
    chat.stop();
    expect(sent().type).toBe("response.create");
    const stream_id = streamId();
    FakeSocket.last.push({ type: "response.created", stream_id, response: { id: "resp_9", status: "in_progress" } });
    expect(sent()).toEqual({ type: "response.cancel", response_id: "resp_9" });
  });

  it("shows the error of a refused request and can retry", () => {
    chat.send("One");
    FakeSocket.last.push({ type: "error", stream_id: streamId(), status: 400, error: { message: "n must be 1..64" } });
    expect(leaf().status.value).toBe("error");
    expect(leaf().error.value).toBe("n must be 1..64");
    chat.regenerate(leaf());
    expect(sent()).toMatchObject({ input: [{ content: "One" }] });
  });

  it("sends beam search parameters instead of sampling parameters", () => {
    sampling.value = { ...DEFAULT_SAMPLING, search: "beam", n: 4 };
    chat.send("One");
    expect(sent()).toMatchObject({ beam_width: 4, n: 4 });
    expect(sent()).not.toHaveProperty("temperature");
  });

  it("sends the parameters that differ from the defaults, with beams those that apply to them", () => {
    const penalties = {
      presencePenalty: 0.5,
      frequencyPenalty: -0.5,
      repetitionPenalty: 1.1,
      stop: "END\n\nEND\nstop",
    };
    const fields = { presence_penalty: 0.5, frequency_penalty: -0.5, repetition_penalty: 1.1, stop: ["END", "stop"] };
    expect(requestFields(DEFAULT_SAMPLING)).toEqual({ temperature: 0.8, top_p: 0.95 });
    const changed = { ...DEFAULT_SAMPLING, ...penalties, topK: 40, minP: 0.05 };
    expect(requestFields(changed)).toEqual({ temperature: 0.8, top_p: 0.95, top_k: 40, min_p: 0.05, ...fields });
    const beams = { n: 4, beam_width: 4, stream_beams: true };
    expect(requestFields({ ...changed, search: "beam", n: 4 })).toEqual({ ...beams, ...fields });
    const lines = Array.from({ length: 20 }, (_, at) => `line ${at}`).join("\n");
    expect(requestFields({ ...DEFAULT_SAMPLING, stop: lines }).stop).toHaveLength(16);
  });

  it("sends a schema that is a JSON object", () => {
    const fields = (schema: string) => requestFields({ ...DEFAULT_SAMPLING, schema }).text;
    const format = { type: "json_schema", name: "answer", schema: { type: "object" } };
    expect(fields(' {"type": "object"} ')).toEqual({ format });
    for (const wrong of ["", "  ", "{", "[]", "null", "3"]) expect(fields(wrong)).toBeUndefined();
    expect(parseSchema({ ...DEFAULT_SAMPLING, schema: "{" }).error).toContain("This is not JSON");
    expect(parseSchema({ ...DEFAULT_SAMPLING, schema: "[]" }).error).toContain("A schema is an object");
  });

  it("sends the system prompt with every turn and stores it with the conversation", async () => {
    systemPrompt.value = "Be brief.";
    chat.send("One");
    expect(sent().instructions).toBe("Be brief.");
    reply(["first"]);
    await vi.advanceTimersByTimeAsync(500);
    expect(calls.find((call) => call.method === "POST")?.body).toEqual({ metadata: { system: "Be brief." } });
  });

  it("starts a new conversation without the system prompt of the previous one", async () => {
    replies["/v1/conversations/conv_1"] = { id: "conv_1", updated_at: 1, rev: 2, metadata: { system: "Be brief." } };
    systemPrompt.value = "Be brief.";
    chat.send("One");
    reply(["first"]);
    chat.newConversation(); // pending settings are saved
    await vi.advanceTimersByTimeAsync(0);
    expect(systemPrompt.value).toBe("");
    chat.send("Two");
    expect(sent()).not.toHaveProperty("instructions");
    await chat.open("conv_1");
    expect(systemPrompt.value).toBe("Be brief.");
  });

  it("stores the settings of a new conversation that is left before the server has created it", async () => {
    const other = { id: "conv_2", updated_at: 1, rev: 2, active_leaf: null, metadata: { system: "Be long." } };
    replies["/v1/conversations/conv_2"] = other;
    replies["/v1/conversations/conv_2/items"] = { data: [] };
    replies["/v1/conversations/conv_1"] = { ...other, id: "conv_1", metadata: { system: "Be brief." } };
    systemPrompt.value = "Be brief.";
    chat.send("One");
    const frame = sent();
    await chat.open("conv_2");
    expect(systemPrompt.value).toBe("Be long.");
    FakeSocket.last.sent.push(frame); // the request that `reply` answers
    reply(["first"]);
    await chat.open("conv_1");
    expect([systemPrompt.value, texts()]).toEqual(["Be brief.", ["One", "first"]]);
    const saves = calls.filter(({ method }) => method === "POST");
    expect(saves.map(({ path, body }) => [path, body])).toEqual([
      ["/v1/conversations/conv_1", { metadata: { system: "Be brief." } }],
    ]);
  });

  it("keeps the settings chosen for a new conversation while another one is shown", async () => {
    const other = { id: "conv_2", updated_at: 1, rev: 2, active_leaf: null, metadata: {} };
    replies["/v1/conversations/conv_2"] = other;
    replies["/v1/conversations/conv_2/items"] = { data: [] };
    systemPrompt.value = "Be brief.";
    for (const _ of [1, 2]) {
      await chat.open("conv_2");
      expect(systemPrompt.value).toBe("");
      chat.newConversation();
      expect(systemPrompt.value).toBe("Be brief.");
    }
    chat.newConversation(); // again: it starts afresh
    expect(systemPrompt.value).toBe("");
    await chat.open("conv_2");
    defaultSystem.value = "Be polite.";
    chat.newConversation();
    expect(systemPrompt.value).toBe("Be polite.");
    defaultSystem.value = "";
  });

  it("keeps changed settings of a conversation that is opened again while they are being saved", async () => {
    const stored = { id: "conv_1", updated_at: 1, rev: 2, active_leaf: null, metadata: { system: "Be brief." } };
    replies["/v1/conversations/conv_1"] = stored;
    replies["/v1/conversations/conv_1/items"] = replies["/v1/conversations/conv_2/items"] = { data: [] };
    replies["/v1/conversations/conv_2"] = { ...stored, id: "conv_2", metadata: {} };
    await chat.open("conv_1");
    systemPrompt.value = "Be long.";
    let save = () => {};
    const reply = { ...stored, rev: 3, metadata: { system: "Be long." } };
    const saved = new Promise((resolve) => {
      save = () => resolve({ ok: true, status: 200, json: () => Promise.resolve(reply) });
    });
    const immediate = fetch as unknown as (url: URL, init: RequestInit) => Promise<unknown>;
    vi.stubGlobal("fetch", (url: URL, init: RequestInit) => (init.method === "POST" ? saved : immediate(url, init)));
    await chat.open("conv_2");
    expect(systemPrompt.value).toBe("");
    await chat.open("conv_1");
    expect(systemPrompt.value).toBe("Be long.");
    save();
    await vi.advanceTimersByTimeAsync(1000);
    expect([systemPrompt.value, chat.conversations.find("conv_1")!.rev]).toEqual(["Be long.", 3]);
    await chat.open("conv_2");
    await chat.open("conv_1");
    expect(systemPrompt.value).toBe("Be long.");
  });

  it("shows the stored answer if the response cannot be resumed after a reconnect", async () => {
    chat.send("One");
    const stream_id = streamId();
    const created = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" }, input_item_ids: ["msg_u1"] };
    FakeSocket.last.push({ type: "response.created", stream_id, response: created });
    FakeSocket.last.close();
    expect(chat.socket.state.value).toBe("lost");
    const content = (text: string) => [{ type: "text", text }];
    const common = { status: "completed", response_id: "resp_1", index: 0, num_tokens: 1, created_at: 0 };
    const items = [
      { ...common, id: "msg_u1", role: "user", parent_id: null, content: content("One") },
      {
        ...common,
        id: "msg_a1",
        role: "assistant",
        parent_id: "msg_u1",
        finish_reason: "stop",
        content: content("whole"),
      },
    ];
    replies["/v1/conversations/conv_1"] = { id: "conv_1", active_leaf: "msg_a1", updated_at: 1 };
    replies["/v1/conversations/conv_1/items"] = { data: items };
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    await vi.advanceTimersByTimeAsync(20_000);
    FakeSocket.last.open();
    expect(sent()).toMatchObject({ type: "response.resume" });
    FakeSocket.last.push({ type: "error", status: 404, error: { message: "no such response" }, stream_id });
    await vi.advanceTimersByTimeAsync(10);
    expect(texts()).toEqual(["One", "whole"]);
    expect(chat.live.value).toBeNull();
  });

  it("keeps the words that a killed server has not stored", async () => {
    chat.send("One");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    const created = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" }, input_item_ids: ["msg_u1"] };
    push({ type: "response.created", response: created });
    push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a1" } });
    push({ type: "response.output_text.delta", output_index: 0, delta: "stored and seen" });
    await vi.advanceTimersByTimeAsync(100);
    const content = (text: string) => [{ type: "text", text }];
    const common = { response_id: "resp_1", index: 0, num_tokens: 1, created_at: 0 };
    const user = {
      ...common,
      id: "msg_u1",
      role: "user",
      parent_id: null,
      content: content("One"),
      status: "completed",
    };
    const cut = { ...common, id: "msg_a1", role: "assistant", parent_id: "msg_u1", content: content("stored") };
    replies["/v1/conversations/conv_1"] = { id: "conv_1", active_leaf: "msg_a1", updated_at: 1, rev: 4 };
    const items = [user, { ...cut, status: "incomplete", finish_reason: "cancelled" }];
    replies["/v1/conversations/conv_1/items"] = { data: items };
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    FakeSocket.last.close();
    await vi.advanceTimersByTimeAsync(20_000);
    FakeSocket.last.open();
    FakeSocket.last.push({ type: "conversation.subscribed", running: [] });
    await vi.advanceTimersByTimeAsync(10);
    FakeSocket.last.push({ type: "error", status: 404, error: { message: "no such response" }, stream_id });
    await vi.advanceTimersByTimeAsync(4_000);
    const now = { id: "conv_1", active_leaf: "msg_a1", updated_at: 2, rev: 5 };
    replies["/v1/conversations/conv_1"] = now;
    FakeSocket.last.push({ type: "conversation.updated", conversation: now, running: [] }); // loads it once more
    await vi.advanceTimersByTimeAsync(100);
    expect(texts()).toEqual(["One", "stored and seen"]);
    expect(leaf().status.value).toBe("interrupted");
    expect(chat.live.value).toBeNull();
  });

  it("goes on after the last stored message when the server lost the answer", async () => {
    chat.send("One");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    const created = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" }, input_item_ids: ["msg_u1"] };
    push({ type: "response.created", response: created });
    push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a1" } });
    push({ type: "response.output_text.delta", output_index: 0, delta: "half" });
    const user = { id: "msg_u1", role: "user", parent_id: null, response_id: "resp_1", status: "completed" };
    replies["/v1/conversations/conv_1"] = { id: "conv_1", active_leaf: "msg_u1", updated_at: 1 };
    replies["/v1/conversations/conv_1/items"] = { data: [{ ...user, content: [{ type: "text", text: "One" }] }] };
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    FakeSocket.last.close();
    await vi.advanceTimersByTimeAsync(20_000);
    FakeSocket.last.open();
    FakeSocket.last.push({ type: "error", status: 404, error: { message: "no such response" }, stream_id });
    await vi.advanceTimersByTimeAsync(4_000);
    expect(chat.live.value).toBeNull(); // not after 20 polls: the server reports that nothing runs
    expect(texts()).toEqual(["One", "half"]);
    expect(leaf().status.value).toBe("error");
    chat.send("Two");
    expect(sent()).toMatchObject({ previous_item_id: "msg_u1" });
  });

  it.each([
    ["max_output_tokens", "length"],
    ["steered", "steered"],
    ["interrupted", "interrupted"],
  ])("shows a response that is incomplete because of %s as %s", (reason, status) => {
    chat.send("One");
    const stream_id = streamId();
    const response = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" } };
    FakeSocket.last.push({ type: "response.created", stream_id, response });
    const ended = { ...response, status: "incomplete", incomplete_details: { reason } };
    FakeSocket.last.push({ type: "response.incomplete", stream_id, response: ended });
    expect(leaf().status.value).toBe(status);
  });

  it("stops a running answer and goes on with a message sent meanwhile", () => {
    chat.send("One");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    const response = {
      id: "resp_1",
      status: "in_progress",
      conversation: { id: "conv_1" },
      input_item_ids: ["msg_u1"],
    };
    push({ type: "response.created", response });
    push({ type: "response.output_item.added", output_index: 0, item: { id: "msg_a1" } });
    chat.send("Two");
    expect(sent()).toEqual({ type: "response.cancel", response_id: "resp_1", reason: "steered" });
    push({ type: "response.output_item.done", output_index: 0, item: { id: "msg_a1", finish_reason: "cancelled" } });
    push({ type: "response.incomplete", response: { ...response, status: "cancelled" } });
    expect(sent()).toMatchObject({ previous_item_id: "msg_a1", input: [{ role: "user", content: "Two" }] });
    const path = chat.thread.value.tree.value.path.value;
    expect(path.map(({ status }) => status.value)).toEqual(["done", "steered", "done", "waiting"]);
  });

  it("sends queued messages one by one, and none after a stop", () => {
    chat.send("One");
    chat.unsent.enqueue("Two");
    chat.unsent.enqueue("Three");
    expect(chat.thread.value.queued.value.map(({ text }) => text)).toEqual(["Two", "Three"]);
    reply(["answer"], "1");
    expect(sent()).toMatchObject({ input: [{ content: "Two" }] });
    chat.stop();
    reply(["cut"], "2", "cancelled");
    expect(chat.live.value).toBeNull();
    expect(chat.thread.value.queued.value.map(({ text }) => text)).toEqual(["Three"]);
    chat.unsent.sendFirst();
    expect(sent()).toMatchObject({ input: [{ content: "Three" }] });
    chat.unsent.enqueue("Four");
    chat.unsent.dequeue(chat.thread.value.queued.value[0]!);
    expect(chat.prefill.text.value).toBe("Four");
    reply(["answer"], "3");
    expect(chat.live.value).toBeNull();
  });

  it("keeps queued messages across a reload, in the message box and in order", async () => {
    chat.send("One");
    for (const text of ["Two", "Three"]) chat.unsent.enqueue(text);
    reply(["answer"], "1");
    expect(sent()).toMatchObject({ input: [{ content: "Two" }] });
    chat.unsent.enqueue("Four");
    chat.prefill.text.value = "Five";
    expect(await storedDrafts()).toEqual({ conv_1: "Three\n\nFour\n\nFive" });
    chat.newConversation(); // the queue of a hidden conversation goes on
    reply(["answer"], "2");
    expect(sent()).toMatchObject({ input: [{ content: "Three" }] });
    expect(await storedDrafts()).toEqual({ conv_1: "Four\n\nFive" });
    await chat.open("conv_1");
    expect(chat.prefill.text.value).toBe("Five");
    const reloaded = new Chat("ws://test/v1/responses");
    await reloaded.open("conv_1");
    expect([reloaded.prefill.text.value, reloaded.thread.value.queued.value]).toEqual(["Four\n\nFive", []]);
  });

  it("keeps the text of an editor across a reload, if its message is stored", async () => {
    chat.send("One");
    reply(["answer"]);
    const [question, answer] = chat.thread.value.tree.value.path.value as [Message, Message];
    chat.unsent.drafts.keepEdit(question, QUESTION_EDITOR, "Two");
    const unstored = chat.thread.value.tree.value.add({ key: "u", parent: answer.key, role: "user" });
    chat.unsent.drafts.keepEdit(unstored, QUESTION_EDITOR, "Three");
    await vi.advanceTimersByTimeAsync(1000);
    const reloaded = new Chat("ws://test/v1/responses").unsent.drafts;
    expect([question, unstored].map((each) => reloaded.editOf(each, QUESTION_EDITOR))).toEqual(["Two", undefined]);
    chat.unsent.drafts.keepEdit(question, QUESTION_EDITOR, null);
    expect(chat.unsent.drafts.editOf(question, QUESTION_EDITOR)).toBeUndefined();
  });

  it("sends the queue only when the server is ready", async () => {
    chat.send("One");
    chat.unsent.enqueue("Two");
    statuses["/readyz"] = 503;
    replies["/readyz"] = { status: "loading" };
    void chat.readiness.pollUntilReady();
    reply(["answer"]);
    await vi.advanceTimersByTimeAsync(5000);
    expect(sent()).toMatchObject({ input: [{ content: "One" }] });
    expect(chat.thread.value.queued.value).toHaveLength(1);
    statuses["/readyz"] = 200;
    await vi.advanceTimersByTimeAsync(1000);
    expect(sent()).toMatchObject({ input: [{ content: "Two" }] });
  });

  describe("a message that is longer than the context", () => {
    const refuse = () => {
      const error = { code: "context_length_exceeded", message: "Too many tokens" };
      FakeSocket.last.push({ type: "error", stream_id: streamId(), status: 400, error });
    };

    it("returns to the empty message box, and stays there across a reload", async () => {
      chat.send("One");
      reply(["answer"]);
      chat.send("Long");
      refuse();
      expect(texts()).toEqual(["One", "answer"]);
      expect(chat.prefill.text.value).toBe("Long");
      expect(chat.thread.value.refusal.value).toBe("Too many tokens. Your message is in the message box again.");
      await vi.advanceTimersByTimeAsync(1000);
      const reloaded = new Chat("ws://test/v1/responses");
      await reloaded.open("conv_1");
      expect(reloaded.prefill.text.value).toBe("Long");
      chat.send("Short");
      expect(sent()).toMatchObject({ previous_item_id: "msg_a10", input: [{ content: "Short" }] });
      expect(chat.thread.value.refusal.value).toBe("");
    });

    it("stays in the thread while another text is in the message box", () => {
      chat.send("Long");
      chat.prefill.text.value = "Next";
      refuse();
      expect([texts(), chat.prefill.text.value]).toEqual([["Long", ""], "Next"]);
    });

    it("stays in the thread as a version of the edited message", () => {
      chat.send("One");
      reply(["answer"]);
      chat.edit(chat.thread.value.tree.value.path.value[0]!, "Long");
      refuse();
      expect([texts(), chat.prefill.text.value]).toEqual([["Long", ""], ""]);
    });

    describe("and a version of another one", () => {
      let question: Message;
      const newest = () => chat.thread.value.tree.value.path.value[0]!;
      const draftAfterReload = async () => {
        await vi.advanceTimersByTimeAsync(1000);
        return new Chat("ws://test/v1/responses").unsent.drafts.editOf(question, QUESTION_EDITOR);
      };

      beforeEach(() => {
        chat.send("One");
        reply(["answer"]);
        question = newest();
        chat.edit(question, "Long");
        refuse();
      });

      it("is in the editor of that message after a reload", async () => {
        expect(await draftAfterReload()).toBe("Long");
      });

      it("is replaced as a draft by the next refused one", async () => {
        chat.edit(newest(), "Longer");
        refuse();
        expect(await draftAfterReload()).toBe("Longer");
      });

      it("is no draft once another version is stored", async () => {
        chat.edit(newest(), "Short");
        reply(["answer"], "2");
        chat.unsent.drafts.saveSoon();
        expect(await draftAfterReload()).toBeUndefined();
      });

      it("is no draft once it is deleted", async () => {
        chat.edits.remove(newest());
        chat.unsent.drafts.saveSoon();
        expect(await draftAfterReload()).toBeUndefined();
      });
    });

    it("returns to its hidden conversation", async () => {
      chat.send("One");
      reply(["answer"]);
      chat.send("Long");
      const stream = sent();
      await chat.open("conv_7");
      FakeSocket.last.sent.push(stream);
      refuse();
      expect(chat.prefill.text.value).toBe("");
      await chat.open("conv_1");
      expect(chat.prefill.text.value).toBe("Long");
    });
  });

  describe("a message that failed and is not stored", () => {
    const fail = () => {
      const error = { code: "rate_limit_exceeded", message: "Too many requests" };
      FakeSocket.last.push({ type: "error", stream_id: streamId(), status: 429, error });
    };

    it("returns to the message box of the next new chat, before what is written there", async () => {
      const file = { name: "notes.txt", state: "ready", block: "File: notes.txt\n```\nBuy milk.\n```\n" } as Attachment;
      chat.send("One", {}, [file]);
      fail();
      chat.send("Two");
      fail();
      chat.prefill.text.value = "Three";
      await chat.open("conv_7");
      expect(chat.prefill.text.value).toBe("");
      chat.newConversation();
      expect([texts(), chat.prefill.text.value]).toEqual([[], "One\n\nTwo\n\nThree"]);
      expect(chat.thread.value.attachments.value).toEqual([file]);
      expect(await storedDrafts()).toEqual({ "": "One\n\nTwo\n\nThree" });
    });

    it("stays in its thread while that is shown, and is in the message box after a reload", async () => {
      chat.send("One");
      fail();
      expect([texts(), chat.prefill.text.value]).toEqual([["One", ""], ""]);
      expect(await storedDrafts()).toEqual({ "": "One" });
      expect(new Chat("ws://test/v1/responses").prefill.text.value).toBe("One");
    });

    it("is in the message box of its conversation after a reload, until a retry has stored it", async () => {
      chat.send("One");
      reply(["answer"]);
      chat.send("Two");
      fail();
      expect(await storedDrafts()).toEqual({ conv_1: "Two" });
      chat.regenerate(leaf());
      reply(["answer"], "2");
      expect(await storedDrafts()).toEqual({});
    });

    it("is not taken from a new chat whose answer is generated", () => {
      chat.send("One");
      chat.newConversation();
      expect([texts(), chat.prefill.text.value]).toEqual([[], ""]);
    });
  });

  it("sends a queued message with the settings of the moment when it was written", () => {
    chat.send("One");
    systemPrompt.value = "Be brief.";
    chat.unsent.enqueue("Two");
    systemPrompt.value = "";
    reply(["answer"]);
    expect(sent()).toMatchObject({ instructions: "Be brief." });
  });

  it("keeps an unsent text for each conversation, and across a reload", async () => {
    chat.prefill.text.value = "for a new one";
    await chat.open("conv_7");
    expect(chat.prefill.text.value).toBe("");
    chat.prefill.text.value = "for seven";
    chat.newConversation();
    expect(chat.prefill.text.value).toBe("for a new one");
    await vi.advanceTimersByTimeAsync(1000);
    const reloaded = new Chat("ws://test/v1/responses");
    expect(reloaded.prefill.text.value).toBe("for a new one");
    await reloaded.open("conv_7");
    expect(reloaded.prefill.text.value).toBe("for seven");
  });

  describe("of two tabs", () => {
    it("each keeps the unsent texts of the other", async () => {
      const other = new Chat("ws://test/v1/responses");
      await chat.open("conv_7");
      chat.prefill.text.value = "for seven";
      expect(await storedDrafts()).toEqual({ conv_7: "for seven" });
      other.prefill.text.value = "for a new one";
      expect(await storedDrafts()).toEqual({ conv_7: "for seven", "": "for a new one" });
    });

    it("one does not bring back what was sent in the other", async () => {
      await chat.open("conv_7");
      chat.prefill.text.value = "for seven";
      await storedDrafts();
      const other = new Chat("ws://test/v1/responses");
      chat.prefill.text.value = "";
      expect(await storedDrafts()).toEqual({});
      other.prefill.text.value = "for a new one";
      expect(await storedDrafts()).toEqual({ "": "for a new one" });
    });
  });

  it("keeps the text written during the first answer when the conversation gets its id", () => {
    chat.send("One");
    chat.prefill.text.value = "Two";
    reply(["answer"]);
    expect(chat.prefill.text.value).toBe("Two");
    chat.newConversation();
    expect(chat.prefill.text.value).toBe("");
  });

  it("resumes a response after the last received frame when the connection is back", async () => {
    chat.send("One");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    const response = {
      id: "resp_1",
      status: "in_progress",
      conversation: { id: "conv_1" },
      input_item_ids: ["msg_u1"],
    };
    push({ type: "response.created", sequence_number: 0, response });
    push({ type: "response.output_item.added", sequence_number: 1, output_index: 0, item: { id: "msg_a1" } });
    push({ type: "response.output_text.delta", sequence_number: 2, output_index: 0, delta: "wh" });
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    FakeSocket.last.close();
    await vi.advanceTimersByTimeAsync(20_000);
    FakeSocket.last.open();
    expect(sent()).toEqual({ type: "response.resume", response_id: "resp_1", starting_after: 2, stream_id });
    push({ type: "response.resumed", response_id: "resp_1", status: "in_progress", sequence_number: 9 });
    push({ type: "response.output_text.delta", sequence_number: 3, output_index: 0, delta: "ole" });
    push({ type: "response.completed", sequence_number: 4, response: { ...response, status: "completed" } });
    await vi.advanceTimersByTimeAsync(20);
    expect(texts()).toEqual(["One", "whole"]);
    expect(leaf().status.value).toBe("done");
    expect(chat.live.value).toBeNull();
  });

  describe("a message whose receipt the lost connection has not confirmed", () => {
    const created = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" }, input_item_ids: ["msg_u1"] };
    let first: Record<string, unknown>;

    beforeEach(async () => {
      replies["/v1/conversations"] = { data: [], has_more: false, next: null };
      chat.send("One");
      first = sent();
      FakeSocket.last.close();
      await vi.advanceTimersByTimeAsync(20_000);
      FakeSocket.last.open();
    });

    it("is sent again with the same idempotency key, and its answer is shown", () => {
      expect(first.idempotency_key).toMatch(/^[!-~]{20,255}$/);
      expect(sent()).toEqual(first);
      reply(["answer"]);
      expect(texts()).toEqual(["One", "answer"]);
      expect([leaf().status.value, chat.thread.value.id.value]).toEqual(["done", "conv_1"]);
      chat.regenerate(leaf());
      expect(sent().idempotency_key).not.toBe(first.idempotency_key);
    });

    it("can be stopped before it is confirmed", () => {
      chat.stop();
      FakeSocket.last.push({ type: "response.created", stream_id: streamId(), response: created });
      expect(sent()).toEqual({ type: "response.cancel", response_id: "resp_1" });
    });

    it("fails with the error of the server", () => {
      const error = { code: "rate_limit_exceeded", message: "Too many requests" };
      FakeSocket.last.push({ type: "error", status: 429, error, stream_id: streamId() });
      expect([leaf().status.value, leaf().error.value]).toEqual(["error", "Too many requests"]);
      expect(calls.filter(({ path }) => path === "/v1/responses")).toEqual([]);
    });

    describe("and that a busy server refuses", () => {
      const refuse = (status = 503) =>
        FakeSocket.last.push({ type: "error", status, error: { message: "loading" }, stream_id: first.stream_id });
      const requests = () => FakeSocket.last.sent.filter(({ type }) => type === "response.create");

      beforeEach(() => refuse());

      it("is sent again until the server accepts it", async () => {
        expect([leaf().status.value, requests().length]).toEqual(["waiting", 1]);
        await vi.advanceTimersByTimeAsync(1000);
        refuse();
        await vi.advanceTimersByTimeAsync(1000);
        expect(requests()).toEqual([first, first, first]);
        FakeSocket.last.sent.push(first); // the request that `reply` answers
        reply(["answer"]);
        expect([leaf().status.value, texts()]).toEqual(["done", ["One", "answer"]]);
        await vi.advanceTimersByTimeAsync(2000);
        expect(requests().length).toBe(4);
      });

      it("is sent once on a new connection", async () => {
        FakeSocket.last.close();
        FakeSocket.last.onclose = null;
        chat.socket.retryNow();
        FakeSocket.last.open();
        await vi.advanceTimersByTimeAsync(2000);
        expect(requests()).toEqual([first]);
      });

      it("fails when it is refused after a stop", async () => {
        chat.stop();
        await vi.advanceTimersByTimeAsync(1000);
        refuse();
        expect([leaf().status.value, chat.live.value]).toEqual(["error", null]);
      });

      it("fails with an error that does not pass", async () => {
        await vi.advanceTimersByTimeAsync(1000);
        refuse(400);
        expect(leaf().error.value).toBe("loading");
      });
    });

    it("is shown as it is stored if its events have expired", async () => {
      const stored = { status: "completed", response_id: "resp_1", index: 0, num_tokens: 1, created_at: 0 };
      const content = (text: string) => [{ type: "text", text }];
      replies["/v1/responses"] = { ...created, status: "completed" };
      replies["/v1/conversations/conv_1"] = { id: "conv_1", active_leaf: "msg_a1", updated_at: 1, rev: 2 };
      replies["/v1/conversations/conv_1/items"] = {
        data: [
          { ...stored, id: "msg_u1", role: "user", parent_id: null, content: content("One") },
          { ...stored, id: "msg_a1", role: "assistant", parent_id: "msg_u1", content: content("whole") },
        ],
      };
      const error = { code: "stream_expired", param: "stream", message: "no longer available" };
      FakeSocket.last.push({ type: "error", status: 400, error, stream_id: streamId() });
      await vi.advanceTimersByTimeAsync(100);
      const headers = expect.objectContaining({ "idempotency-key": first.idempotency_key }) as unknown;
      expect(calls).toContainEqual({ method: "POST", path: "/v1/responses", body: first, headers });
      expect(texts()).toEqual(["One", "whole"]);
      expect([...chat.thread.value.tree.value.all()].map(({ id }) => id.value)).toEqual(["msg_u1", "msg_a1"]);
      expect([leaf().status.value, chat.live.value]).toEqual(["done", null]);
    });

    it("fails if the server does not return it", async () => {
      statuses["/v1/responses"] = 404;
      const error = { code: "stream_expired", param: "stream", message: "no longer available" };
      FakeSocket.last.push({ type: "error", status: 400, error, stream_id: streamId() });
      await vi.advanceTimersByTimeAsync(100);
      expect(leaf().error.value).toBe("The connection was lost and the server has no stored answer.");
    });
  });

  it("does not send to a conversation that did not load", async () => {
    statuses["/v1/conversations/conv_7"] = 500;
    await chat.open("conv_7");
    expect(chat.thread.value.state.value).toBe("failed");
    chat.send("Hello");
    expect(FakeSocket.last.sent.map((frame) => frame.type)).toEqual(["conversation.subscribe"]);
    delete statuses["/v1/conversations/conv_7"];
    replies["/v1/conversations/conv_7"] = { id: "conv_7", active_leaf: null, updated_at: 1 };
    replies["/v1/conversations/conv_7/items"] = { data: [] };
    await chat.open("conv_7");
    expect(chat.thread.value.state.value).toBe("ready");
  });

  it("keeps the list position of a renamed or pinned conversation and moves a continued one", async () => {
    const DAY_S = 24 * 3600;
    const nowS = Date.now() / 1000;
    const old = { id: "conv_o", title: "Old", created_at: 1, updated_at: nowS - 90 * DAY_S, rev: 4, metadata: {} };
    const young = { ...old, id: "conv_y", title: "Young", updated_at: nowS };
    replies["/v1/conversations"] = { data: [young, old], has_more: false, next: null };
    await chat.conversations.refresh();
    const groups = () =>
      chat.conversations.groups.value.map(({ name, conversations }) => [name, ...conversations.map(({ id }) => id)]);
    const month = groups()[1]![0];
    expect(month).not.toBe("Today");
    replies["/v1/conversations/conv_o"] = { ...old, title: "Renamed", rev: 5 };
    await chat.conversations.rename("conv_o", "Renamed");
    expect(groups()).toEqual([
      ["Today", "conv_y"],
      [month, "conv_o"],
    ]);
    for (const [rev, metadata] of [
      [6, { pinned: "true" }],
      [7, {}],
    ] as const) {
      replies["/v1/conversations/conv_o"] = { ...old, title: "Renamed", rev, metadata };
      await chat.conversations.pin("conv_o", rev === 6);
      expect(groups()).toEqual(
        rev === 6
          ? [
              ["Pinned", "conv_o"],
              ["Today", "conv_y"],
            ]
          : [
              ["Today", "conv_y"],
              [month, "conv_o"],
            ],
      );
    }
    FakeSocket.last.push({ type: "conversation.updated", conversation: { ...old, rev: 8, updated_at: nowS + 1 } });
    expect(groups()).toEqual([["Today", "conv_o", "conv_y"]]);
  });

  it("locks the page until an API key is entered, sends the key once and does not store it", async () => {
    statuses["/v1/conversations"] = 401;
    await chat.start();
    expect(chat.conversations.state.value).toBe("locked");
    expect(chat.socket.state.value).toBe("refused");
    statuses["/v1/session"] = 401;
    await chat.signIn("sk-0");
    expect(chat.socket.state.value).toBe("refused");
    delete statuses["/v1/session"];
    delete statuses["/v1/conversations"];
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    await chat.signIn("sk-1");
    const requests = calls.filter((call) => JSON.stringify(call.headers ?? {}).includes("sk-1"));
    expect(requests.map(({ method, path }) => [method, path])).toEqual([["POST", "/v1/session"]]);
    expect(chat.socket.state.value).toBe("connecting");
    expect(FakeSocket.last.protocols).toEqual(["chatcache.v1"]);
    const stored = [localStorage, sessionStorage].flatMap((store) =>
      Object.values(store as unknown as Record<string, string>),
    );
    expect(stored.filter((value) => value.includes("sk-1"))).toEqual([]);
  });

  it("resets the page if another user signs in", async () => {
    const reset = vi.fn();
    localStorage.setItem("chatcache.owner", "null");
    const page = new Chat(undefined, reset);
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    replies["/v1/session"] = { key_id: "key_1", tenant: "acme", user: "ann" };
    await page.start();
    await vi.advanceTimersByTimeAsync(0);
    replies["/v1/session"] = { key_id: "key_2", tenant: "acme", user: "ann" };
    await page.signIn("sk-2");
    expect(reset).not.toHaveBeenCalled();
    replies["/v1/session"] = { key_id: "key_3", tenant: "acme", user: "bob" };
    FakeSocket.last.open();
    FakeSocket.last.close(1006); // another tab has signed in as bob
    await vi.advanceTimersByTimeAsync(0);
    expect(reset).toHaveBeenCalled();
    reset.mockClear();
    await page.signIn("sk-3");
    expect(reset).toHaveBeenCalledOnce();
  });

  it("locks the page when the session has ended", async () => {
    statuses["/v1/session"] = 401;
    FakeSocket.last.close(4401);
    await vi.advanceTimersByTimeAsync(0);
    expect(chat.conversations.state.value).toBe("locked");
    expect(chat.socket.state.value).toBe("refused");
  });

  it("does not lock the page when only the connection is lost", async () => {
    FakeSocket.last.close(1006);
    await vi.advanceTimersByTimeAsync(0);
    expect(chat.conversations.state.value).not.toBe("locked");
    expect(chat.socket.state.value).toBe("lost");
  });

  it("reports the loading progress until the model is ready", async () => {
    statuses["/readyz"] = 503;
    replies["/readyz"] = { status: "loading", progress: 0.4, detail: "weights" };
    chat.readiness.status.value = { phase: "unknown" };
    void chat.readiness.pollUntilReady();
    await vi.advanceTimersByTimeAsync(800);
    expect(chat.readiness.status.value).toEqual({ phase: "loading", progress: 0.4, detail: "weights" });
    delete statuses["/readyz"];
    replies["/readyz"] = { status: "ready", max_model_len: 2048 };
    await vi.advanceTimersByTimeAsync(800);
    expect(chat.readiness.status.value.phase).toBe("ready");
    expect(chat.readiness.contextTokens.value).toBe(2048);
  });

  it("does not reconnect after a refusal", async () => {
    const refused = FakeSocket.last;
    refused.close(4401);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(FakeSocket.last).toBe(refused);
    expect(chat.socket.state.value).toBe("refused");
  });
});
