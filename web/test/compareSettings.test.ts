// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { WireResponse } from "../src/api/frames";
import { announcement } from "../src/app/notifications";
import { autoTitle, DEFAULT_SAMPLING, sampling, systemPrompt } from "../src/app/settings";
import { settingsOf } from "../src/chat/answerSettings";
import { Chat } from "../src/chat/chat";
import { ChatContext } from "../src/ui/context";
import { FakeSocket, fakeNetwork } from "./fakes";

const SCHEMA = { type: "object" };
const FORMAT = { format: { type: "json_schema", name: "answer", schema: SCHEMA } };

function response(fields: Partial<WireResponse>): WireResponse {
  return { id: "resp_1", status: "completed", temperature: 0.8, top_p: 0.95, instructions: null, ...fields };
}

describe("differingSettings", () => {
  test.each<[Partial<WireResponse>, Partial<WireResponse>, string[]]>([
    [{}, {}, []],
    [{ temperature: 0 }, {}, ["Temperature 0"]],
    [{}, { temperature: 0 }, ["Temperature 0.8"]],
    [{ instructions: "Be brief." }, { instructions: "" }, ["System prompt: Be brief."]],
    [{}, { instructions: "Be brief." }, ["No system prompt"]],
    [{ text: FORMAT }, { text: FORMAT }, []],
    [{ text: FORMAT }, { text: { format: { type: "text" } } }, ['Schema {"type":"object"}']],
    [{ reasoning: { effort: "none" } }, { reasoning: { effort: null } }, ["No reasoning"]],
    [{ temperature: null, top_p: null }, {}, ["Beam search"]],
  ])("differingSettings of %j beside %j are %j", async (own, other, expected) => {
    vi.stubGlobal("matchMedia", () => ({ matches: false }));
    const { differingSettings } = await import("../src/ui/thread/CompareSettings");
    expect(differingSettings(settingsOf(response(own)), settingsOf(response(other)))).toEqual(expected);
  });
});

describe("Compare settings", () => {
  let chat: Chat;
  let server: ReturnType<typeof fakeNetwork>;
  const sent = () => FakeSocket.last.sent.at(-1)!;
  const text = (selector: string) => [...document.querySelectorAll(selector)].map((found) => found.textContent);
  const button = (label: string) =>
    [...document.querySelectorAll("button")].find((each) => each.textContent?.trim() === label)!;
  const settle = async () => {
    await vi.dynamicImportSettled();
    await vi.advanceTimersByTimeAsync(50);
  };
  const answer = (words: string, name: string, fields: Partial<WireResponse>, end = true) => {
    const stream_id = sent().stream_id;
    const push = (frame: object) => FakeSocket.last.push({ stream_id, ...frame });
    const found = {
      ...response(fields),
      id: `resp_${name}`,
      conversation: { id: "conv_1" },
      input_item_ids: ["msg_u"],
    };
    push({ type: "response.created", response: found });
    push({ type: "response.output_item.added", output_index: 0, item: { id: `msg_${name}` } });
    push({ type: "response.output_text.delta", output_index: 0, delta: words });
    if (end) push({ type: "response.completed", response: found });
  };
  const write = (label: string, value: string) => {
    const field = [...document.querySelectorAll("label")].find((each) => each.textContent?.startsWith(label))!;
    const input = field.querySelector<HTMLInputElement>("textarea, input")!;
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const openForm = async () => {
    const leaf = chat.thread.value.tree.value.leaf.value!;
    const { CompareSettingsForm } = await import("../src/ui/thread/CompareSettings");
    render(
      h(ChatContext.Provider, { value: chat }, h(CompareSettingsForm, { message: leaf, onClose: () => {} })),
      document.body,
    );
    await settle();
  };
  const showThread = async () => {
    const leaf = chat.thread.value.tree.value.leaf.value!;
    const { ComparedAnswers } = await import("../src/ui/thread/CompareSettings");
    const answers = chat.thread.value.comparedWith(leaf)!;
    render(h(ChatContext.Provider, { value: chat }, h(ComparedAnswers, { answers, chosen: leaf })), document.body);
    await settle();
  };

  beforeEach(() => {
    server = fakeNetwork();
    vi.stubGlobal("matchMedia", () => ({ matches: false }));
    Range.prototype.getBoundingClientRect ??= () => new DOMRect();
    autoTitle.value = false;
    chat = new Chat("ws://test/v1/responses");
    chat.socket.connect();
    FakeSocket.last.open();
    sampling.value = { ...DEFAULT_SAMPLING, n: 3, seed: 5 };
    systemPrompt.value = "Be kind.";
    chat.send("Hello", { n: 1 });
    answer("Good day", "1", { instructions: "Be kind." });
  });
  afterEach(() => {
    render(null, document.body);
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  test("CompareSettingsForm asks for one answer with its settings and keeps those of the conversation", async () => {
    await openForm();
    await vi.advanceTimersByTimeAsync(5000); // the conversation's own settings are stored
    const [before, calls] = [sampling.value, server.calls.length];
    expect(document.activeElement?.tagName).toBe("TEXTAREA");
    write("System prompt", "");
    write("Temperature", "0");
    write("JSON schema", JSON.stringify(SCHEMA));
    button("Off").click();
    await settle();
    button("Generate").click();
    expect(sent()).toMatchObject({
      type: "response.create",
      input: [],
      previous_item_id: "msg_u",
      temperature: 0,
      seed: 5,
      text: FORMAT,
      reasoning: { effort: "none" },
    });
    expect(sent()).not.toHaveProperty("instructions");
    expect(sent()).not.toHaveProperty("n");
    await vi.advanceTimersByTimeAsync(5000);
    expect([sampling.value, systemPrompt.value]).toEqual([before, "Be kind."]);
    expect(server.calls.slice(calls)).toEqual([]);
  });

  test("CompareSettingsForm refuses a schema that is not JSON", async () => {
    await openForm();
    write("JSON schema", "{");
    await settle();
    expect(button("Generate").disabled).toBe(true);
    write("JSON schema", "{}");
    await settle();
    expect(button("Generate").disabled).toBe(false);
  });

  test("ComparedAnswers names the settings that differ and marks the words that differ once both have ended", async () => {
    const first = chat.thread.value.tree.value.leaf.value!;
    chat.compareSettings(first, { temperature: 0 }, { instructions: "" });
    answer("Good night", "2", { temperature: 0, instructions: null }, false);
    await showThread();
    expect(text(".card-settings li")).toEqual([
      "System prompt: Be kind.",
      "Temperature 0.8",
      "No system prompt",
      "Temperature 0",
    ]);
    expect(text(".differences")).toEqual([]);
    FakeSocket.last.push({
      stream_id: sent().stream_id,
      type: "response.completed",
      response: response({ id: "resp_2", conversation: { id: "conv_1" } }),
    });
    await settle();
    expect(text(".differences mark")).toEqual(["day", "night"]);
    expect(text(".candidates-common")).toEqual(["All begin with the same 5 charactersGood "]);
  });

  test("picking ends the comparison, and the other answer stays as a version", async () => {
    const first = chat.thread.value.tree.value.leaf.value!;
    chat.compareSettings(first, { temperature: 0 }, {});
    answer("Good night", "2", { temperature: 0 });
    const second = chat.thread.value.tree.value.leaf.value!;
    expect(chat.thread.value.comparedWith(first)).toEqual([first, second]);
    chat.pick(first);
    expect(announcement.value).toBe("Picked answer 1.");
    expect(chat.thread.value.comparedWith(first)).toBeNull();
    expect(chat.thread.value.tree.value.leaf.value).toBe(first);
    expect(chat.thread.value.tree.value.siblings(first)).toEqual([first, second]);
  });

  test("comparedWith is null for a further version, and once one of the answers is deleted", () => {
    const tree = chat.thread.value.tree.value;
    const first = tree.leaf.value!;
    chat.compareSettings(first, { temperature: 0 }, {});
    answer("Good night", "2", { temperature: 0 });
    chat.answer(chat.thread.value.questionOf(first)!, { n: 1 });
    answer("Good morning", "3", {});
    expect(chat.thread.value.comparedWith(tree.leaf.value!)).toBeNull();
    expect(chat.thread.value.comparedWith(first)?.length).toBe(2);
    tree.remove(tree.byId("msg_2")!);
    expect(chat.thread.value.comparedWith(first)).toBeNull();
  });

  test("going on ends the comparison", () => {
    chat.compareSettings(chat.thread.value.tree.value.leaf.value!, { temperature: 0 }, {});
    answer("Good night", "2", { temperature: 0 });
    chat.send("Thanks", { n: 1 });
    expect(sent()).toMatchObject({ previous_item_id: "msg_2", temperature: 0.8, instructions: "Be kind." });
    expect(chat.thread.value.compared.value).toBeNull();
  });

  test("ComparedAnswers loads the settings of stored answers once for each response", async () => {
    const first = chat.thread.value.tree.value.leaf.value!;
    chat.compareSettings(first, { temperature: 0 }, {});
    answer("Good night", "2", { temperature: 0 });
    for (const message of chat.thread.value.comparedWith(first)!)
      chat.thread.value.turnOf(message)!.settings.value = null; // as after a reload
    server.replies["/v1/responses/resp_1"] = response({ temperature: 0.8 });
    server.replies["/v1/responses/resp_2"] = response({ temperature: 0 });
    await showThread();
    await showThread();
    expect(text(".card-settings li")).toEqual(["Temperature 0.8", "Temperature 0"]);
    expect(server.calls.filter(({ path }) => path.startsWith("/v1/responses/")).length).toBe(2);
  });
});
