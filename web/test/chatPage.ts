/** A `Chat` on a fake network, with the frames of answers, for the tests of chats. */

import { afterEach, beforeEach, vi } from "vitest";
import { autoTitle, DEFAULT_SAMPLING, sampling, systemPrompt } from "../src/app/settings";
import { Chat } from "../src/chat/chat";
import { type Call, FakeSocket, fakeNetwork } from "./fakes";

export let calls: Call[];
export let statuses: Record<string, number>;
export let replies: Record<string, unknown>;
export let chat: Chat;

/** Open a chat before each test of the file. */
export function openChat(): void {
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
}

export const sent = () => FakeSocket.last.sent.at(-1)!;
export const streamId = () => sent().stream_id as string;

/** The response of the first message, as the server has created it. */
export const CREATED = {
  id: "resp_1",
  status: "in_progress",
  conversation: { id: "conv_1" },
  input_item_ids: ["msg_u1"],
};

/** Send the first frames of that response, with the beginning of its text. */
export function beginReply(text = ""): void {
  const stream_id = streamId();
  FakeSocket.last.push({ type: "response.created", stream_id, response: CREATED });
  FakeSocket.last.push({ type: "response.output_item.added", stream_id, output_index: 0, item: { id: "msg_a1" } });
  if (text) FakeSocket.last.push({ type: "response.output_text.delta", stream_id, output_index: 0, delta: text });
}

/** Send the frames of one response with these texts as candidates. */
export function reply(texts: readonly string[], name = "1", finish: "completed" | "cancelled" = "completed"): void {
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

export const texts = () => chat.thread.value.tree.value.path.value.map((message) => message.text.value);
export const leaf = () => chat.thread.value.tree.value.leaf.value!;

/** The unsent texts that a reload finds. */
export async function storedDrafts(): Promise<unknown> {
  await vi.advanceTimersByTimeAsync(1000);
  return JSON.parse(localStorage.getItem("chatcache.drafts")!);
}
