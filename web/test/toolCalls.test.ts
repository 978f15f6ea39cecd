// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { ServerFrame } from "../src/api/frames";
import { Chat } from "../src/chat/chat";
import { type Message, Tree } from "../src/chat/tree";
import { DeltaBatcher, Turn } from "../src/chat/turn";
import { ChatContext } from "../src/ui/context";
import { fakeNetwork } from "./fakes";

const CALL = { call_id: "call_1", name: "look", namespace: "files", arguments: '{"at":1}', candidate: 1 };

describe("Turn", () => {
  const tree = new Tree();
  const answer = (key: string) => tree.add({ key, parent: null, role: "assistant", status: "waiting" });
  const calls = (turn: Turn) => turn.candidates.map((message) => message.calls.value.map((call) => call.arguments));

  test("a call belongs to its candidate, and leaves the text to the message", () => {
    const turn = new Turn("turn", [answer("a"), answer("b")]);
    const batcher = new DeltaBatcher();
    const done = { type: "response.output_item.done", output_index: 3 } as const;
    turn.apply({ ...done, item: { id: "fc_1", type: "function_call", ...CALL } }, batcher);
    expect(calls(turn)).toEqual([[], ['{"at":1}']]);
    expect(turn.candidates.map(({ id, status }) => [id.value, status.value])).toEqual([
      [null, "waiting"],
      [null, "waiting"],
    ]);
    turn.apply({ ...done, item: { id: "msg_1", type: "message" } }, batcher);
    expect(calls(turn)).toEqual([[], ['{"at":1}']]);
  });

  test("a snapshot holds the calls, of which none is repeated", () => {
    const turn = new Turn("turn", [answer("c"), answer("d")]);
    const call = { item_id: "fc_1", output_index: 2, type: "function_call", ...CALL };
    const snapshot = (text: string): ServerFrame => ({
      type: "response.snapshot",
      outputs: [Object.assign({}, call, { arguments: text })],
    });
    vi.stubGlobal("requestAnimationFrame", () => 0);
    for (const text of ['{"at', '{"at":1}']) turn.apply(snapshot(text), new DeltaBatcher());
    expect(calls(turn)).toEqual([[], ['{"at":1}']]);
    vi.unstubAllGlobals();
  });
});

describe("ToolCalls", () => {
  let chat: Chat;
  let answer: Message;
  const cards = () => [...document.querySelectorAll(".tool-call")];
  const parts = () => [...document.querySelectorAll(".tool-call pre")].map((part) => part.textContent);
  const settle = () => vi.advanceTimersByTimeAsync(50);

  beforeEach(async () => {
    fakeNetwork();
    vi.stubGlobal("matchMedia", () => ({ matches: false }));
    const { ToolCalls } = await import("../src/ui/thread/ToolCalls");
    chat = new Chat("ws://test/v1/responses");
    const tree = chat.thread.value.tree.value;
    answer = tree.add({ key: "a", parent: null, role: "assistant" });
    answer.calls.value = [CALL, { ...CALL, call_id: "call_2", name: "<b>find</b>", arguments: '{"cut' }];
    render(h(ChatContext.Provider, { value: chat }, h(ToolCalls, { message: answer })), document.body);
    await settle();
  });
  afterEach(() => {
    render(null, document.body);
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  test("a call without a result shows its name and arguments, which may be cut off", () => {
    expect(cards().map((card) => card.querySelector("summary b")!.textContent)).toEqual([
      "files.look",
      "files.<b>find</b>",
    ]);
    expect(cards().map((card) => card.querySelector(".hint")!.textContent)).toEqual(["no result", "no result"]);
    expect(parts()).toEqual(['{\n  "at": 1\n}', '{"cut']);
  });

  test("the result is that of the shown branch", async () => {
    const tree = chat.thread.value.tree.value;
    const branch = (key: string, text: string) => {
      const message = tree.add({ key, parent: "a", role: "assistant" });
      message.callOutputs.value = [{ callId: "call_1", text }];
      return message;
    };
    const first = branch("b", "[1]");
    branch("c", "not JSON");
    await settle();
    expect(parts()).toEqual(['{\n  "at": 1\n}', "not JSON", '{"cut']);
    tree.choose(first);
    await settle();
    expect(parts()[1]).toBe("[\n  1\n]");
    expect(cards()[1]!.querySelector(".hint")!.textContent).toBe("no result");
  });

  test.each(['{"id":12345678901234567890}', '{"price":1.0}', '{"a":1,"a":2}'])(
    "arguments that reading would change are shown as they are: %s",
    async (text) => {
      answer.calls.value = [{ ...CALL, arguments: text }];
      await settle();
      expect(parts()).toEqual([text]);
    },
  );

  test("arguments and result are copied", async () => {
    const writeText = vi.fn(() => Promise.resolve());
    vi.stubGlobal("navigator", { clipboard: { writeText } });
    document.querySelector<HTMLButtonElement>("[aria-label='Copy the arguments of files.look']")!.click();
    await settle();
    expect(writeText).toHaveBeenCalledWith('{\n  "at": 1\n}');
  });
});
