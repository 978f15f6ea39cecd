// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { settingsOf } from "../src/chat/answerSettings";
import { type Message, Tree } from "../src/chat/tree";
import { Turn } from "../src/chat/turn";
import { SchemaStatus } from "../src/ui/thread/SchemaStatus";
import { type FakeServer, fakeNetwork } from "./fakes";

const RESPONSE = {
  id: "resp_1",
  status: "completed",
  text: { format: { type: "json_schema", schema: { type: "object", required: ["a"] } } },
};

describe("SchemaStatus", () => {
  let server: FakeServer;
  const spoken = () => document.querySelector("[role=status]")?.textContent;
  const shown = () => document.querySelector<HTMLElement>("[data-schema]");
  const settle = async () => {
    await vi.advanceTimersByTimeAsync(500); // the schema is loaded
    await vi.dynamicImportSettled(); // and then the validator
    await vi.advanceTimersByTimeAsync(500);
  };
  const answers = (text: string, live: boolean, count = 1): [Turn, Message[]] => {
    const tree = new Tree();
    const status = live ? "streaming" : "done";
    const messages = Array.from({ length: count }, (_, index) =>
      tree.add({ key: `a${index}`, parent: null, role: "assistant", text, status }),
    );
    const turn = new Turn("turn", messages);
    turn.responseId.value = "resp_1";
    turn.phase.value = live ? "decode" : "ended";
    return [turn, messages];
  };
  const show = async (turn: Turn, message: Message) => {
    render(h(SchemaStatus, { message, turn }), document.body);
    await settle();
  };

  beforeEach(() => {
    server = fakeNetwork();
    server.replies["/v1/responses/resp_1"] = RESPONSE;
  });
  afterEach(() => {
    render(null, document.body);
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  test.each([
    ['{"a": 1}', "matches"],
    ['{"b": 1}', "invalid"],
    ['{"a": ', "invalid"],
    ["-1.5e3", "invalid"],
  ])("SchemaStatus of the stored answer %s loads the schema and shows: %s", async (text, state) => {
    const [turn, [message]] = answers(text, false);
    await show(turn, message!);
    expect(shown()?.dataset.schema).toBe(state);
    expect(spoken()).toBe(""); // not announced: it ended before
  });

  test.each(["Hello", "- one\n- two", "1. one", "null and void"])(
    "SchemaStatus loads nothing for the stored answer %j, which is no JSON",
    async (text) => {
      const [turn, [message]] = answers(text, false);
      await show(turn, message!);
      expect([server.calls, shown()]).toEqual([[], null]);
    },
  );

  test("SchemaStatus loads the schema once for all answers to one request", async () => {
    const [turn, messages] = answers("{}", false, 3);
    render(
      messages.map((message) => h(SchemaStatus, { key: message.key, message, turn })),
      document.body,
    );
    await settle();
    expect(document.querySelectorAll("[data-schema=invalid]").length).toBe(3);
    expect(server.calls.length).toBe(1);
  });

  test("SchemaStatus shows nothing if the server does not have the response", async () => {
    server.statuses["/v1/responses/resp_1"] = 404;
    const [turn, [message]] = answers("{}", false);
    await show(turn, message!);
    expect([server.calls.length, shown(), spoken()]).toEqual([1, null, undefined]);
  });

  test("SchemaStatus announces the verdict once, when the answer ends", async () => {
    const [turn, [message]] = answers('{"a": ', true);
    turn.settings.value = settingsOf(RESPONSE);
    const texts: (string | null)[] = [];
    await show(turn, message!);
    new MutationObserver(() => texts.push(document.querySelector("[role=status]")!.textContent)).observe(
      document.querySelector("[role=status]")!,
      { childList: true, characterData: true, subtree: true },
    );
    expect([shown()?.dataset.schema, spoken()]).toEqual(["incomplete", ""]);
    message!.text.value += "1}";
    await settle();
    expect([shown()?.dataset.schema, spoken()]).toEqual(["matches", ""]);
    message!.status.value = "done";
    await settle();
    expect(texts.filter((text) => text !== "")).toEqual(["Matches the schema"]);
    expect(shown()!.getAttribute("aria-hidden")).toBe("true"); // the announced text stays, and is not read twice
  });

  test("SchemaStatus announces the verdict of an answer that begins and ends between two frames", async () => {
    const [turn, [message]] = answers("", true);
    await show(turn, message!);
    turn.settings.value = settingsOf(RESPONSE);
    message!.text.value = "[]";
    message!.status.value = "done";
    await settle();
    expect(spoken()).toBe(
      'Does not match the schema. At the top level: the type "array" is invalid. Expected "object".',
    );
  });

  test("SchemaStatus announces also if the validator was loaded after the end, with the number of the answer", async () => {
    const [turn, [, message]] = answers("[", true, 2);
    turn.settings.value = settingsOf(RESPONSE);
    render(h(SchemaStatus, { message: message!, turn }), document.body);
    await Promise.resolve();
    await show(turn, message!);
    message!.status.value = "stopped";
    await settle();
    expect(spoken()).toBe("Answer 2: Does not match the schema. The JSON ends before it is complete.");
  });
});
