import { beforeEach, describe, expect, it, vi } from "vitest";
import { Chat } from "../src/chat/chat";
import {
  beginReply,
  CREATED,
  calls,
  chat,
  leaf,
  openChat,
  replies,
  reply,
  sent,
  statuses,
  streamId,
  texts,
} from "./chatPage";
import { FakeSocket } from "./fakes";

openChat();

describe("A chat whose server is away", () => {
  it("shows the stored answer if the response cannot be resumed after a reconnect", async () => {
    chat.send("One");
    const stream_id = streamId();
    FakeSocket.last.push({ type: "response.created", stream_id, response: CREATED });
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
    beginReply("stored and seen");
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
    beginReply("half");
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

  it("resumes a response after the last received frame when the connection is back", async () => {
    chat.send("One");
    const stream_id = streamId();
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    push({ type: "response.created", sequence_number: 0, response: CREATED });
    push({ type: "response.output_item.added", sequence_number: 1, output_index: 0, item: { id: "msg_a1" } });
    push({ type: "response.output_text.delta", sequence_number: 2, output_index: 0, delta: "wh" });
    replies["/v1/conversations"] = { data: [], has_more: false, last_id: null };
    FakeSocket.last.close();
    await vi.advanceTimersByTimeAsync(20_000);
    FakeSocket.last.open();
    expect(sent()).toEqual({ type: "response.resume", response_id: "resp_1", starting_after: 2, stream_id });
    push({ type: "response.resumed", response_id: "resp_1", status: "in_progress", sequence_number: 9 });
    push({ type: "response.output_text.delta", sequence_number: 3, output_index: 0, delta: "ole" });
    push({ type: "response.completed", sequence_number: 4, response: { ...CREATED, status: "completed" } });
    await vi.advanceTimersByTimeAsync(20);
    expect(texts()).toEqual(["One", "whole"]);
    expect(leaf().status.value).toBe("done");
    expect(chat.live.value).toBeNull();
  });

  describe("a message whose receipt the lost connection has not confirmed", () => {
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
      FakeSocket.last.push({ type: "response.created", stream_id: streamId(), response: CREATED });
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
      replies["/v1/responses"] = { ...CREATED, status: "completed" };
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
