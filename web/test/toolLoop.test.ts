// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { autoTitle, DEFAULT_SAMPLING, parseSampling, sampling, setSampling, systemPrompt } from "../src/app/settings";
import { Chat } from "../src/chat/chat";
import { MAX_ROUNDS, runCall } from "../src/chat/toolLoop";
import { Turn } from "../src/chat/turn";
import { ChatContext } from "../src/ui/context";
import { FakeSocket, fakeNetwork } from "./fakes";

const TOOLS = [
  { name: "search", description: "Search.", parameters: { type: "object" }, needs_confirmation: false },
  { name: "write", description: "Write.", parameters: {}, needs_confirmation: true },
];
const SERVERS = { data: [{ name: "docs", state: "ready", error: null, tools: TOOLS }] };
const CALLS = "/v1/mcp/calls";

let network: ReturnType<typeof fakeNetwork>;
let chat: Chat;
let number: number;
let answers: { resolve: (body: object, status?: number) => void; signal: AbortSignal; body: Record<string, unknown> }[];

/** The calls of tools wait for the test; other requests are answered at once. */
function holdCalls(): void {
  answers = [];
  vi.stubGlobal("fetch", (url: URL, init: RequestInit) => {
    if (url.pathname !== CALLS) return network.fetch(url, init);
    return new Promise((resolve, reject) => {
      const signal = init.signal as AbortSignal;
      const respond = (body: object, status = 200) =>
        resolve({ ok: status === 200, status, json: () => Promise.resolve(body) });
      signal.addEventListener("abort", () => reject(new DOMException("stopped", "AbortError")));
      answers.push({ resolve: respond, signal, body: JSON.parse(init.body as string) as Record<string, unknown> });
    });
  });
}

const result = (output: string, is_error = false) => ({ output, is_error, seconds: 0.25 });
const settle = () => vi.advanceTimersByTimeAsync(50);
const sent = () => FakeSocket.last.sent.filter(({ type }) => type === "response.create");
const last = () => sent().at(-1)!;
const leaf = () => chat.thread.value.tree.value.leaf.value!;

beforeEach(async () => {
  network = fakeNetwork();
  network.replies["/v1/mcp/servers"] = SERVERS;
  holdCalls();
  vi.stubGlobal("matchMedia", () => ({ matches: false }));
  number = 0;
  sampling.value = { ...DEFAULT_SAMPLING, toolServers: ["docs"] };
  systemPrompt.value = "";
  autoTitle.value = false;
  chat = new Chat("ws://test/v1/responses");
  chat.socket.connect();
  FakeSocket.last.open();
  await import("../src/chat/toolLoop");
});
afterEach(() => {
  render(null, document.body);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

/** Answer the last request with a text and calls, and end the response. */
async function answerWith(text: string, ...calls: [name: string, args: string][]): Promise<void> {
  await settle();
  const name = ++number;
  const stream_id = last().stream_id;
  const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
  const response = { id: `resp_${name}`, status: "in_progress", conversation: { id: "conv_1" } };
  const item = { id: `msg_${name}`, type: "message", candidate: 0 };
  push({ type: "response.created", response: { ...response, input_item_ids: [`in_${name}`] } });
  push({ type: "response.output_item.added", output_index: 0, item });
  push({ type: "response.output_text.done", output_index: 0, text });
  push({ type: "response.output_item.done", output_index: 0, item: { ...item, finish_reason: "tool_calls" } });
  calls.forEach(([tool, args], at) => {
    const [namespace, called] = tool.includes(".") ? tool.split(".") : [undefined, tool];
    const call = { call_id: `call_${name}_${at}`, name: called, namespace, arguments: args, candidate: 0 };
    push({
      type: "response.output_item.done",
      output_index: at + 1,
      item: { id: "fc", type: "function_call", ...call },
    });
  });
  push({ type: "response.completed", response: { ...response, status: "completed" } });
  await settle();
}

const output = (call_id: string, text: string) => ({ type: "function_call_output", call_id, output: text });

describe("requests", () => {
  test("the tools of servers that are switched on are sent, once the list is loaded", async () => {
    chat.send("Hi");
    expect(sent()).toEqual([]);
    expect(chat.live.value).not.toBeNull();
    await settle();
    const functions = TOOLS.map(({ name, description, parameters }) => ({
      type: "function",
      name,
      description,
      parameters,
    }));
    expect(last().tools).toEqual([{ type: "namespace", name: "docs", tools: functions }]);
  });

  test("without a switched-on server the list is not even loaded", () => {
    sampling.value = DEFAULT_SAMPLING;
    chat.send("Hi");
    expect(last()).not.toHaveProperty("tools");
    expect(network.calls.map(({ path }) => path)).not.toContain("/v1/mcp/servers");
  });

  test("a list that does not load is reported, and the message is sent without tools", async () => {
    network.statuses["/v1/mcp/servers"] = 500;
    chat.send("Hi");
    await settle();
    expect(last()).not.toHaveProperty("tools");
  });

  test("a draft is prefilled after the tools", async () => {
    await chat.toolServers.load();
    chat.prefill.text.value = "Find";
    await vi.advanceTimersByTimeAsync(1000);
    const draft = FakeSocket.last.sent.findLast(({ type }) => type === "prompt.prewarm")!;
    expect(draft.tools).toMatchObject([{ type: "namespace", name: "docs" }]);
  });

  test("a response that follows an output belongs to the answer that called", () => {
    const { thread } = chat;
    const stored = { status: "completed", content: [], response_id: null, index: null, num_tokens: 1, created_at: 0 };
    const rest = { ...stored, finish_reason: null };
    const items = [
      { ...rest, id: "msg_a", role: "assistant", parent_id: null },
      { ...rest, id: "out", role: "tool", parent_id: "msg_a", call_id: "c" },
    ];
    const head = { id: "conv_1", title: null, created_at: 0, updated_at: 0, active_leaf: "out", rev: 1 };
    thread.value.load(items, head);
    expect(thread.value.messageOf("out")?.id.value).toBe("msg_a");
    expect(thread.value.messageOf("none")).toBeUndefined();
  });

  test("stored names are validated", () => {
    expect(parseSampling({ toolServers: ["docs", 3, "a b", ""] }).toolServers).toEqual(["docs"]);
    expect(parseSampling({ toolServers: "docs" }).toolServers).toEqual([]);
  });
});

describe("calls", () => {
  test("an allowed tool runs at once, and its result continues the answer", async () => {
    chat.send("Find it");
    await answerWith("Searching.", ["docs.search", '{"q":1}']);
    expect(answers.map(({ body }) => body)).toEqual([
      { server: "docs", tool: "search", arguments: '{"q":1}', confirmed: false },
    ]);
    expect(sent()).toHaveLength(1);
    answers[0]!.resolve(result("found"));
    await settle();
    expect(last()).toMatchObject({ previous_item_id: "msg_1", input: [output("call_1_0", "found")] });
    expect(last().tools).toHaveLength(1);
    await answerWith("Here it is.");
    expect(chat.thread.value.tree.value.path.value.map(({ text }) => text.value)).toEqual([
      "Find it",
      "Searching.",
      "Here it is.",
    ]);
    expect(leaf().callOutputs.value).toEqual([{ callId: "call_1_0", text: "found" }]);
  });

  test("the answer continues with the settings that the question was sent with", async () => {
    setSampling({ temperature: 0.3, n: 1, replyStart: "Well," });
    systemPrompt.value = "Be brief.";
    chat.send("Find it");
    await answerWith("", ["docs.search", "{}"]);
    systemPrompt.value = "Be long.";
    setSampling({ temperature: 0.9 });
    answers[0]!.resolve(result("found"));
    await settle();
    expect(last()).toMatchObject({ temperature: 0.3, instructions: "Be brief.", input: [output("call_1_0", "found")] });
    expect(last()).not.toHaveProperty("continue_final_message");
  });

  test("the continuation waits for all results, whatever their order", async () => {
    chat.send("Find both");
    await answerWith("", ["docs.search", '{"q":1}'], ["docs.search", '{"q":2}']);
    answers[1]!.resolve(result("two", true));
    await settle();
    expect(sent()).toHaveLength(1);
    answers[0]!.resolve(result("one"));
    await settle();
    expect(last().input).toEqual([output("call_1_0", "one"), output("call_1_1", "two")]);
    expect(sent()).toHaveLength(2);
  });

  test("a failed call and an unknown tool are errors for the model", async () => {
    chat.send("Find it");
    await answerWith("", ["docs.search", "{}"], ["docs.erase", "{}"], ["plain", "{}"]);
    expect(answers).toHaveLength(1);
    answers[0]!.resolve({ error: { message: "docs is down" } }, 502);
    await settle();
    expect(last().input).toEqual([
      output("call_1_0", "Error: docs is down"),
      output("call_1_1", "Error: there is no tool docs.erase."),
      output("call_1_2", "Error: there is no tool plain."),
    ]);
  });

  test("a tool that is no longer allowed waits for the user", async () => {
    chat.send("Find it");
    await answerWith("", ["docs.search", "{}"]);
    const asks = TOOLS.map((tool) => ({ ...tool, needs_confirmation: true }));
    network.replies["/v1/mcp/servers"] = { data: [{ ...SERVERS.data[0], tools: asks }] };
    answers[0]!.resolve({ error: { message: "confirm it", code: "confirmation_required" } }, 403);
    await settle();
    expect([sent().length, leaf().callRuns.value.size]).toEqual([1, 0]);
    expect(chat.toolServers.find(leaf().calls.value[0]!)!.needs_confirmation).toBe(true);
  });

  /** Answer the last request with one call and without a text: the answer gets its id when it is stored. */
  async function answerWithCall(name: string): Promise<void> {
    await settle();
    const push = (frame: object) => FakeSocket.last.push({ stream_id: last().stream_id, ...frame });
    const response = { id: "resp_1", status: "in_progress", conversation: { id: "conv_1" } };
    const call = { call_id: "c", name, namespace: "docs", arguments: "{}", candidate: 0 };
    push({ type: "response.created", response: { ...response, input_item_ids: ["in_1"] } });
    push({ type: "response.output_item.done", output_index: 0, item: { id: "fc", type: "function_call", ...call } });
    const stored = { status: "completed", content: [], response_id: null, index: null, num_tokens: 1, created_at: 0 };
    network.replies["/v1/conversations/conv_1"] = { id: "conv_1", rev: 2, active_leaf: "msg_7", metadata: {} };
    network.replies["/v1/conversations/conv_1/items"] = {
      data: [
        { ...stored, id: "in_1", role: "user", parent_id: null, content: [{ type: "text", text: "Find it" }] },
        {
          ...stored,
          id: "msg_7",
          role: "assistant",
          parent_id: "in_1",
          response_id: "resp_1",
          index: 0,
          calls: [call],
        },
      ],
    };
    push({ type: "response.completed", response: { ...response, status: "completed" } });
  }

  test("an answer without text continues by its stored id", async () => {
    chat.send("Find it");
    await answerWithCall("search");
    await settle();
    answers[0]!.resolve(result("found"));
    await settle();
    expect(last()).toMatchObject({ previous_item_id: "msg_7", input: [output("c", "found")] });
  });

  test("an answer without text gets its id while its call waits for the user", async () => {
    chat.send("Delete it");
    await answerWithCall("write");
    await settle();
    expect(leaf().id.value).toBe("msg_7");
  });

  test.each(["search", "write"])("a message written instead of the result of %s follows the answer", async (name) => {
    chat.send("Delete it");
    await answerWithCall(name);
    chat.send("No, rename it");
    await settle();
    expect(last()).toMatchObject({ previous_item_id: "msg_7", input: [{ content: "No, rename it" }] });
    expect(chat.thread.value.tree.value.path.value.map(({ id }) => id.value)).toEqual(["in_1", "msg_7", null, null]);
  });

  test("another message stops a running call, whose result is not sent", async () => {
    chat.send("Find it");
    await answerWith("", ["docs.search", "{}"]);
    chat.send("Never mind");
    await settle();
    expect(answers[0]!.signal.aborted).toBe(true);
    expect(sent()).toHaveLength(2);
    expect(last().input).toEqual([{ role: "user", content: "Never mind" }]);
  });

  test("queued messages wait until the answer has continued", async () => {
    chat.send("Find it");
    await settle();
    chat.unsent.enqueue("And then?");
    await answerWith("", ["docs.search", "{}"]);
    expect(sent()).toHaveLength(1);
    answers[0]!.resolve(result("found"));
    await settle();
    expect(last().input).toEqual([output("call_1_0", "found")]);
    await answerWith("Here.");
    expect(last().input).toEqual([{ role: "user", content: "And then?" }]);
  });

  test("of several answers none runs its calls by itself", async () => {
    chat.send("Find it", { n: 2 });
    await answerWith("", ["docs.search", "{}"]);
    expect(answers).toEqual([]);
  });

  test("running a call of one of several answers picks it", async () => {
    const thread = chat.thread.value;
    const tree = thread.tree.value;
    tree.add({ key: "q", id: "msg_q", parent: null, role: "user", text: "Find it" });
    const answer = (key: string) =>
      tree.add({ key, id: `msg_${key}`, parent: "q", role: "assistant", turn: "t" }, key === "a");
    const turn = new Turn("t", [answer("a"), answer("b")]);
    const call = { call_id: "c", name: "write", namespace: "docs", arguments: "{}", candidate: 1 };
    thread.addTurn(turn);
    thread.live.value = null;
    await chat.toolServers.load();
    turn.candidates[1]!.calls.value = [call];
    void runCall(chat, thread, turn.candidates[1]!, call, true);
    answers[0]!.resolve(result("written"));
    await settle();
    expect(last()).toMatchObject({ previous_item_id: "msg_b", input: [output("c", "written")] });
    expect(tree.path.value.map(({ key }) => key).slice(0, 2)).toEqual(["q", "b"]);
    expect(turn.showsCandidates.value).toBe(false);
  });

  test("after many rounds an allowed tool waits for the user", async () => {
    chat.send("Loop");
    for (let round = 0; round <= MAX_ROUNDS; round++) {
      await answerWith("", ["docs.search", "{}"]);
      answers[round]?.resolve(result("again"));
      await settle();
    }
    expect(answers).toHaveLength(MAX_ROUNDS);
    expect(sent()).toHaveLength(MAX_ROUNDS + 1);
  });

  test("regenerating an answer that continues sends the results again", async () => {
    chat.send("Find it");
    await answerWith("", ["docs.search", "{}"]);
    answers[0]!.resolve(result("found"));
    await answerWith("Here.");
    chat.regenerate(leaf());
    await settle();
    expect(last()).toMatchObject({ previous_item_id: "msg_1", input: [output("call_1_0", "found")] });
    expect(answers).toHaveLength(1);
  });
});

describe("cards", () => {
  const button = (label: string) =>
    [...document.querySelectorAll<HTMLButtonElement>("button")].find(
      ({ textContent }) => textContent?.trim() === label,
    );
  const hints = () => [...document.querySelectorAll(".tool-call summary .hint")].map(({ textContent }) => textContent);

  async function show(): Promise<void> {
    const { ToolCalls } = await import("../src/ui/thread/ToolCalls");
    render(h(ChatContext.Provider, { value: chat }, h(ToolCalls, { message: leaf() })), document.body);
    await settle();
  }

  test("a tool that needs confirmation waits for Run, and shows its arguments", async () => {
    chat.send("Write");
    await answerWith("", ["docs.write", '{"x":1}']);
    await show();
    expect(answers).toEqual([]);
    expect(document.querySelector(".tool-call")!.hasAttribute("open")).toBe(true);
    expect(hints()).toEqual(["not run yet"]);
    button("Run")!.click();
    await settle();
    expect([hints(), answers.length, button("Run")]).toEqual([["running"], 1, undefined]);
    expect(answers[0]!.body.confirmed).toBe(true);
    answers[0]!.resolve(result("written"));
    await settle();
    expect(hints()).toEqual(["result, 0.25 s"]);
    expect(last().input).toEqual([output("call_1_0", "written")]);
  });

  test("Decline is the result of the call, which is not run", async () => {
    chat.send("Write");
    await answerWith("", ["docs.write", "{}"]);
    await show();
    button("Decline")!.click();
    await settle();
    expect(answers).toEqual([]);
    expect(last().input).toEqual([output("call_1_0", "The user declined this call.")]);
  });

  test("Always in this chat runs this and later calls of the tool, in this conversation only", async () => {
    chat.send("Write");
    await answerWith("", ["docs.write", "1"], ["docs.write", "2"]);
    await show();
    button("Always in this chat")!.click();
    await settle();
    expect(answers.map(({ body }) => body.arguments)).toEqual(["1", "2"]);
    for (const answer of answers) answer.resolve(result("written"));
    await answerWith("", ["docs.write", "3"]);
    expect(answers.map(({ body }) => body.arguments)).toEqual(["1", "2", "3"]);
    chat.newConversation();
    sampling.value = { ...DEFAULT_SAMPLING, toolServers: ["docs"] };
    chat.send("Write");
    await answerWith("", ["docs.write", "4"]);
    expect(answers).toHaveLength(3);
  });

  test("Stop ends a running call, which can be run again", async () => {
    chat.send("Find it");
    await answerWith("", ["docs.search", "{}"]);
    await show();
    button("Stop")!.click();
    await settle();
    expect(answers[0]!.signal.aborted).toBe(true);
    expect([hints(), sent().length]).toEqual([["not run yet"], 1]);
    button("Run")!.click();
    await settle();
    expect(answers).toHaveLength(2);
  });

  test("a stored call has the buttons while nothing follows it, and never runs by itself", async () => {
    const tree = chat.thread.value.tree.value;
    const answer = tree.add({ key: "a", id: "msg_a", parent: null, role: "assistant" });
    answer.calls.value = [{ call_id: "c", name: "search", namespace: "docs", arguments: "{}", candidate: 0 }];
    await show();
    expect([hints(), answers.length]).toEqual([["not run yet"], 0]);
    button("Run")!.click();
    await settle();
    answers[0]!.resolve(result("found"));
    await settle();
    expect(last()).toMatchObject({ previous_item_id: "msg_a", input: [output("c", "found")] });
    tree.add({ key: "b", parent: "a", role: "user", text: "Go on" });
    await settle();
    expect(button("Run")).toBeUndefined();
  });
});

describe("settings", () => {
  test("a switch stores the server with the conversation, and the state of each server is shown", async () => {
    sampling.value = DEFAULT_SAMPLING;
    const down = { name: "down", state: "unavailable", error: "no connection", tools: [] };
    network.replies["/v1/mcp/servers"] = { data: [...SERVERS.data, down] };
    const { ToolSettings } = await import("../src/ui/ToolSettings");
    render(h(ChatContext.Provider, { value: chat }, h(ToolSettings, {})), document.body);
    await settle();
    expect([...document.querySelectorAll(".tool-server .check")].map(({ textContent }) => textContent)).toEqual([
      "docs2 tools",
      "downnot available",
    ]);
    expect([...document.querySelectorAll("li")].map(({ textContent }) => textContent)).toEqual([
      "search runs",
      "write asks first",
    ]);
    document.querySelector<HTMLInputElement>(".tool-server input")!.click();
    await settle();
    expect(sampling.value.toolServers).toEqual(["docs"]);
    document.querySelector<HTMLInputElement>(".tool-server input")!.click();
    await settle();
    expect(sampling.value.toolServers).toEqual([]);
  });
});
