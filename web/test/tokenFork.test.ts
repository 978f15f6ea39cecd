import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { toasts } from "../src/app/notifications";
import { DEFAULT_SAMPLING, prefillWhileTyping, sampling, systemPrompt } from "../src/app/settings";
import { Chat } from "../src/chat/chat";
import { doubtLevel, nextDoubt } from "../src/chat/tokenChoices";
import { type FakeServer, FakeSocket, fakeNetwork } from "./fakes";

let server: FakeServer;
let chat: Chat;

beforeEach(() => {
  server = fakeNetwork();
  sampling.value = DEFAULT_SAMPLING;
  systemPrompt.value = "";
  prefillWhileTyping.value = true;
  toasts.value = [];
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
});
afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

const ITEM = "/v1/conversations/conv_1/items/msg_a0";
const sent = () => FakeSocket.last.sent.at(-1)!;
const creates = () => FakeSocket.last.sent.filter((frame) => frame.type === "response.create");
const push = (frame: object) => FakeSocket.last.push({ stream_id: creates().at(-1)!.stream_id, ...frame });
const leaf = () => chat.thread.value.tree.value.leaf.value!;
const turn = () => chat.thread.value.turnOf(leaf())!;
const response = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" } };
const usage = { input_tokens: 40, output_tokens: 12, input_tokens_details: { cached_tokens: 32 } };

function begin(count: number, name = "a"): void {
  push({ type: "response.created", response: { ...response, input_item_ids: ["msg_u"] } });
  for (let i = 0; i < count; i++)
    push({ type: "response.output_item.added", output_index: i, item: { id: `msg_${name}${i}` } });
}

function end(text: string, finish_reason = "stop", name = "a"): void {
  push({ type: "response.output_text.done", output_index: 0, text });
  push({ type: "response.output_item.done", output_index: 0, item: { id: `msg_${name}0`, finish_reason } });
  push({ type: "response.completed", response: { ...response, status: "completed", usage } });
}

function answer(text: string, finish_reason = "stop"): void {
  chat.send("Hello");
  begin(1);
  end(text, finish_reason);
}

describe("an answer whose tokens are not stored", () => {
  it("is not shown as tokens, but can be continued", () => {
    answer("Hi", "length");
    expect([chat.forks.canOpen(leaf()), chat.forks.canContinue(leaf())]).toEqual([true, true]);
    leaf().tokens.value = 0;
    expect([chat.forks.canOpen(leaf()), chat.forks.canContinue(leaf())]).toEqual([false, true]);
  });
});

describe("forks inside an answer", () => {
  const alternative = (id: number, text: string, probability: number) => ({
    id,
    text,
    logprob: 0,
    probability,
    ends: false,
  });
  beforeEach(() => {
    server.replies[`${ITEM}/tokens`] = {
      data: [
        { index: 0, start: 0, end: 3 },
        { index: 1, start: 3, end: 7 },
        { index: 2, start: null, end: null },
      ],
    };
    server.replies[`${ITEM}/tokens/1`] = {
      index: 1,
      token: { ...alternative(9, " fox", 0.2), rank: 2 },
      alternatives: [alternative(4, " owl", 0.7), alternative(9, " fox", 0.2)],
      usage: { input_tokens: 5, cached_tokens: 4, copied_pages: 1 },
    };
  });

  it("scores all tokens once, walks around the doubts and forks at an alternative without a look-up", async () => {
    const score = (index: number, probability: number, start: number | null, end: number | null) => ({
      ...{ index, start, end },
      token: { ...alternative(index, "x", probability), rank: null },
      alternatives: [alternative(4, " owl", 0.7)],
    });
    server.replies[`${ITEM}/tokens`] = {
      data: [score(0, 0.95, 0, 3), score(1, 0.2, 3, 7), score(2, 0.01, null, null)],
    };
    answer("The fox");
    await chat.forks.open(leaf());
    const inspector = chat.forks.inspector.value!;
    expect(inspector.doubts).toEqual([1]); // the token that shows no text is none
    expect([0.95, 0.6, 0.3, 0.2, 0.05].map(doubtLevel)).toEqual([0, 1, 2, 3, 4]);
    expect([nextDoubt([3, 7], 3, 1), nextDoubt([3, 7], 7, 1), nextDoubt([3, 7], 3, -1)]).toEqual([7, 3, 7]);
    expect(nextDoubt([], 3, 1)).toBeNull();
    chat.forks.branchAt(1, inspector.scoreAt(1)!.alternatives[0]!);
    expect(sent()).toMatchObject({ previous_item_id: "msg_a0", fork_at: 1, fork_with: 4 });
    expect(server.calls.filter((call) => call.path.startsWith(`${ITEM}/tokens`)).length).toBe(2);
  });

  it("creates a sibling of the answer that starts with its first tokens and the chosen token", async () => {
    systemPrompt.value = "Be brief.";
    sampling.value = { ...DEFAULT_SAMPLING, n: 4 };
    chat.send("Hello", { n: 1 });
    begin(1);
    end("The fox");
    const original = leaf();
    await chat.forks.open(original);
    const inspector = chat.forks.inspector.value!;
    expect(inspector.spans.value!.map((span) => span.text)).toEqual(["The", " fox"]);
    await inspector.select(1);
    chat.forks.branch(inspector.alternatives.value!.alternatives[0]!);
    expect(sent()).toMatchObject({
      type: "response.create",
      input: [],
      previous_item_id: "msg_a0",
      fork_at: 1,
      fork_with: 4,
      explain: true,
    });
    expect(sent()).not.toHaveProperty("instructions"); // a forked answer keeps its instructions
    expect(sent()).not.toHaveProperty("n");
    expect(chat.forks.inspector.value).toBeNull();
    begin(1, "b");
    push({
      type: "response.progress",
      phase: "decode",
      input_tokens: 41,
      cached_tokens: 40,
      copied_pages: 0,
      miss: null,
    });
    end("The owl", "stop", "b");
    expect(leaf().text.value).toBe("The owl");
    expect([turn().start?.inspectedPages, turn().copiedPages.value]).toEqual([1, 0]);
    expect(chat.thread.value.tree.value.siblings(leaf())).toEqual([original, leaf()]);
  });

  it("loads the alternatives of a token once", async () => {
    answer("The fox");
    await chat.forks.open(leaf());
    const inspector = chat.forks.inspector.value!;
    await inspector.select(1);
    await inspector.select(null);
    await inspector.select(1);
    expect(inspector.alternatives.value?.token.id).toBe(9);
    expect(server.calls.filter((call) => call.path.endsWith("/tokens/1")).length).toBe(1);
  });

  it("selects the token at the clicked word", async () => {
    answer("The fox");
    const at = async (offset: number) => {
      await chat.forks.open(leaf(), { offset, box: () => null });
      return chat.forks.inspector.value!.selected.value;
    };
    expect([await at(0), await at(2), await at(3), await at(4)]).toEqual([0, 0, 1, 1]);
  });

  it("reports why the tokens of an answer cannot be loaded", async () => {
    answer("The fox");
    server.statuses[`${ITEM}/tokens`] = 400;
    server.replies[`${ITEM}/tokens`] = { error: { message: "no tokens are stored" } };
    await chat.forks.open(leaf());
    expect(chat.forks.inspector.value).toBeNull();
    expect(toasts.value.at(-1)?.text).toBe("no tokens are stored");
  });

  it("does not open an answer that is streaming", async () => {
    chat.send("Hello");
    begin(1);
    await chat.forks.open(leaf());
    expect(chat.forks.inspector.value).toBeNull();
  });

  it("does not open an earlier answer while another one is streaming", async () => {
    answer("The fox");
    const first = leaf();
    chat.send("More");
    expect(chat.forks.canOpen(first)).toBe(false);
  });

  it("continues a cut answer after its last token", async () => {
    answer("The fox", "length");
    server.replies[ITEM] = { num_tokens: 12 };
    await chat.forks.continueAnswer(leaf());
    expect(sent()).toMatchObject({ input: [], previous_item_id: "msg_a0", fork_at: 12 });
    expect(sent()).not.toHaveProperty("fork_with");
  });
});

describe("candidates", () => {
  it("drops one, keeps its receipt, and shows another one", () => {
    sampling.value = { ...DEFAULT_SAMPLING, n: 3 };
    chat.send("Hello");
    begin(3);
    const [first, second] = turn().candidates;
    chat.drop(first!);
    expect(sent()).toEqual({ type: "response.drop", response_id: "resp_1", candidate: 0 });
    expect(leaf()).toBe(second);
    const receipt = { tokens_after_stop: 0, pages_freed: 3, stop_latency_ms: 4 };
    push({ type: "response.dropped", response_id: "resp_1", candidate: 0, receipt });
    push({ type: "response.output_item.done", output_index: 0, item: { id: "msg_a0", finish_reason: "cancelled" } });
    expect(turn().dropped.value.get(first!)).toEqual(receipt);
    expect(first!.status.value).toBe("stopped");
    expect(second!.status.value).toBe("streaming");
    chat.drop(first!); // a second drop has no effect
    expect(FakeSocket.last.sent.filter((frame) => frame.type === "response.drop").length).toBe(1);
  });

  it("shows no error if the candidate to drop has just ended", () => {
    FakeSocket.last.push({
      type: "error",
      status: 404,
      error: { message: "candidate 0 has ended", param: "candidate" },
    });
    expect(toasts.value).toEqual([]);
    FakeSocket.last.push({ type: "error", status: 400, error: { message: "candidate of what", param: "input" } });
    expect(toasts.value.length).toBe(1);
  });

  it("does not drop beams", () => {
    sampling.value = { ...DEFAULT_SAMPLING, search: "beam", n: 2 };
    chat.send("Hello");
    begin(2);
    chat.drop(leaf());
    expect(sent().type).toBe("response.create");
  });
});

describe("statistics of a turn", () => {
  it("stores the reason of the first cache miss", () => {
    chat.send("Hello");
    expect(sent().explain).toBe(true);
    begin(1);
    const miss = { reason: "never_computed", at_token: 32, detail: "nobody has asked this" };
    push({ type: "response.progress", phase: "decode", input_tokens: 40, cached_tokens: 32, copied_pages: 0, miss });
    expect(turn().miss.value).toEqual(miss);
  });

  it("stores reasoning separately from the message", () => {
    chat.send("Hello");
    push({ type: "response.created", response });
    push({
      type: "response.output_item.added",
      output_index: 0,
      item: { id: "rs_a0", type: "reasoning", candidate: 0 },
    });
    push({ type: "response.reasoning_text.delta", output_index: 0, delta: "Hm, " });
    push({ type: "response.reasoning_text.delta", output_index: 0, delta: "well" });
    vi.advanceTimersByTime(20);
    expect(leaf().reasoning.value).toBe("Hm, well");
    push({ type: "response.reasoning_text.done", output_index: 0, text: "Hm, well" });
    push({
      type: "response.output_item.added",
      output_index: 1,
      item: { id: "msg_a0", type: "message", candidate: 0 },
    });
    push({ type: "response.output_text.done", output_index: 1, text: "Hi" });
    const thoughtful = { ...usage, output_tokens_details: { reasoning_tokens: 7 } };
    push({ type: "response.completed", response: { ...response, status: "completed", usage: thoughtful } });
    expect([leaf().reasoning.value, leaf().text.value]).toEqual(["Hm, well", "Hi"]);
    expect(turn().usage.value?.reasoningTokens).toBe(7);
  });
});

describe("reasoning of a stored answer", () => {
  it("is loaded once, when it is opened", async () => {
    answer("Hi");
    server.replies["/v1/conversations/conv_1/items"] = {
      data: [{ type: "message" }, { type: "reasoning", content: [{ text: "Hm, " }, { text: "well" }] }],
    };
    await chat.forks.loadReasoning(leaf());
    await chat.forks.loadReasoning(leaf());
    expect(leaf().reasoning.value).toBe("Hm, well");
    expect(server.calls.filter((call) => call.path.endsWith("/items")).length).toBe(1);
  });
});

describe("prefill while typing", () => {
  const prewarms = () => FakeSocket.last.sent.filter((frame) => frame.type === "prompt.prewarm");
  const warmed = (warm_tokens: number, status = "done") =>
    FakeSocket.last.push({ type: "prompt.prewarmed", status, input_tokens: 48, cached_tokens: 0, warm_tokens });
  beforeEach(() => void vi.advanceTimersByTimeAsync(0));

  it("sends the draft once, after a pause in typing", () => {
    for (const text of ["T", "Te", "Tell me"]) {
      chat.prefill.text.value = text;
      vi.advanceTimersByTime(100);
    }
    expect(prewarms()).toEqual([]);
    vi.advanceTimersByTime(1000);
    expect(prewarms()).toEqual([{ type: "prompt.prewarm", input: [{ role: "user", content: "Tell me" }] }]);
    expect(chat.prefill.progress.value).toBeNull();
    warmed(40);
    vi.advanceTimersByTime(5000);
    expect(prewarms().length).toBe(1);
    expect(chat.prefill.progress.value).toMatchObject({ warmTokens: 40 });
    chat.prefill.text.value = "Tell me a story";
    expect(chat.prefill.progress.value).toMatchObject({ warmTokens: 40 });
    systemPrompt.value = "Be brief."; // a different prompt
    expect(chat.prefill.progress.value).toBeNull();
    systemPrompt.value = "";
    chat.prefill.text.value = "Sing";
    expect(chat.prefill.progress.value).toBeNull();
  });

  it("sends one draft at a time", () => {
    chat.prefill.text.value = "Tell";
    vi.advanceTimersByTime(1000);
    chat.prefill.text.value = "Tell me";
    vi.advanceTimersByTime(1000);
    expect(prewarms().length).toBe(1);
    warmed(30);
    vi.advanceTimersByTime(1000);
    expect(prewarms().length).toBe(2);
  });

  it("waits longer if the server is busy", () => {
    chat.prefill.text.value = "Tell";
    vi.advanceTimersByTime(1000);
    warmed(0, "busy");
    vi.advanceTimersByTime(1000);
    expect(prewarms().length).toBe(1);
    vi.advanceTimersByTime(1500);
    expect(prewarms().length).toBe(2);
  });

  it("shows no error for a refused draft", () => {
    chat.prefill.text.value = "Tell";
    vi.advanceTimersByTime(1000);
    FakeSocket.last.push({ type: "error", status: 400, error: { message: "too long", param: "input" } });
    expect(toasts.value).toEqual([]);
    vi.advanceTimersByTime(5000);
    expect(prewarms().length).toBe(1);
    FakeSocket.last.push({ type: "error", status: 400, error: { message: "of something else" } });
    expect(toasts.value.length).toBe(1);
  });

  it("uses the continuation point of the draft, and stops while an answer is running", () => {
    answer("The fox");
    systemPrompt.value = "Be brief.";
    chat.prefill.text.value = "Why?";
    vi.advanceTimersByTime(1000);
    expect(sent()).toMatchObject({ type: "prompt.prewarm", previous_item_id: "msg_a0", instructions: "Be brief." });
    warmed(30);
    chat.send("Other");
    chat.prefill.text.value = "Why not?";
    vi.advanceTimersByTime(5000);
    expect(prewarms().length).toBe(1);
  });

  it("can be disabled", () => {
    prefillWhileTyping.value = false;
    chat.prefill.text.value = "Tell";
    vi.advanceTimersByTime(5000);
    expect(prewarms()).toEqual([]);
  });
});
