import { describe, expect, it, vi } from "vitest";
import { DEFAULT_SAMPLING, defaultSystem, parseSchema, sampling, systemPrompt } from "../src/app/settings";
import { requestFields } from "../src/chat/request";
import { CREATED, calls, chat, leaf, openChat, replies, reply, sent, streamId, texts } from "./chatPage";
import { FakeSocket } from "./fakes";

openChat();

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
    push({ type: "response.created", response: CREATED });
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
    push({ type: "response.completed", response: { ...CREATED, status: "completed" } });
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
});
