// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { toasts } from "../src/app/notifications";
import { Chat } from "../src/chat/chat";
import { ChatContext } from "../src/ui/context";
import { insertPhrase } from "../src/ui/dictation";
import { fakeNetwork } from "./fakes";

class FakeRecognition {
  static last: FakeRecognition;
  static local = "unavailable";
  static readonly available = () => Promise.resolve(FakeRecognition.local);
  readonly calls: string[] = [];
  lang = "";
  continuous = false;
  processLocally = false;
  onresult: (event: object) => void = () => {};
  onerror: (event: object) => void = () => {};
  onend: () => void = () => {};
  constructor() {
    FakeRecognition.last = this;
  }
  start(): void {
    this.calls.push("start");
  }
  stop(): void {
    this.calls.push("stop");
  }
  abort(): void {
    this.calls.push("abort");
  }
  interimResults = false;
  /** Report phrases; one that ends with "…" is still spoken, and is reported only to those who asked for such. */
  recognise(...phrases: string[]): void {
    const results = phrases
      .map((text) => Object.assign([{ transcript: text.replace("…", "") }], { isFinal: !text.endsWith("…") }))
      .filter(({ isFinal }) => isFinal || this.interimResults);
    this.onresult({ resultIndex: 0, results });
  }
}

describe("insertPhrase", () => {
  test.each([
    ["", 0, 0, "hello", "hello", 5],
    ["Say please", 3, 3, "hello", "Say hello please", 9],
    ["Say  please", 4, 4, "hello", "Say hello please", 9],
    ["Say this please", 4, 8, "hello", "Say hello please", 9],
    ["One\n", 4, 4, "two", "One\ntwo", 7],
  ])("insertPhrase puts a phrase into %j at %d to %d", (text, start, end, phrase, expected, caret) => {
    const area = document.createElement("textarea");
    area.value = text;
    area.setSelectionRange(start, end);
    const onInput = vi.fn();
    area.oninput = onInput;
    insertPhrase(area, phrase);
    expect([area.value, area.selectionStart, area.selectionEnd]).toEqual([expected, caret, caret]);
    expect(onInput).toHaveBeenCalledOnce();
  });
});

describe("VoiceButton", () => {
  let chat: Chat;
  const button = () => document.querySelector<HTMLButtonElement>(".voice");
  const area = () => document.querySelector<HTMLTextAreaElement>("#composer")!;
  const pressed = () => button()!.getAttribute("aria-pressed");
  const settle = async () => {
    await vi.dynamicImportSettled();
    await vi.advanceTimersByTimeAsync(50);
  };
  const show = async () => {
    const { Composer } = await import("../src/ui/Composer");
    chat = new Chat("ws://test/v1/responses");
    render(h(ChatContext.Provider, { value: chat }, h(Composer, {})), document.body);
    await settle();
  };
  const listen = async () => {
    button()!.click();
    await settle();
    return FakeRecognition.last;
  };

  beforeEach(() => {
    fakeNetwork();
    vi.stubGlobal("matchMedia", () => ({ matches: false }));
    vi.stubGlobal("webkitSpeechRecognition", FakeRecognition);
    FakeRecognition.local = "unavailable";
    toasts.value = [];
  });
  afterEach(() => {
    render(null, document.body);
    vi.unstubAllGlobals();
    vi.useRealTimers();
  });

  test("VoiceButton is hidden in a browser without speech recognition", async () => {
    vi.stubGlobal("webkitSpeechRecognition", undefined);
    await show();
    expect(button()).toBeNull();
  });

  test("VoiceButton puts final phrases at the cursor and ends with the recognition", async () => {
    await show();
    chat.prefill.text.value = "Dear . Bye";
    await settle();
    area().setSelectionRange(5, 5);
    const recognition = await listen();
    expect([recognition.lang, recognition.continuous, recognition.calls]).toEqual([
      navigator.language,
      true,
      ["start"],
    ]);
    expect([pressed(), button()!.getAttribute("aria-label")]).toEqual(["true", "Stop voice input"]);
    recognition.recognise(" Ada ", "…");
    recognition.recognise("Lovelace");
    expect(chat.prefill.text.value).toBe("Dear Ada Lovelace . Bye");
    button()!.click();
    expect(recognition.calls).toEqual(["start", "stop"]);
    recognition.recognise("again"); // the phrase that was spoken
    recognition.onend();
    await settle();
    expect(pressed()).toBe("false");
    expect(chat.prefill.text.value).toBe("Dear Ada Lovelace again . Bye");
    expect(toasts.value).toEqual([]);
  });

  test("VoiceButton shows the words of a phrase that is still spoken, and replaces them by the final ones", async () => {
    await show();
    const interim = () => document.querySelector(".voice-interim")?.textContent;
    const recognition = await listen();
    const shownAfter = async (...phrases: string[]) => {
      recognition.recognise(...phrases);
      await settle();
      return [interim(), chat.prefill.text.value];
    };
    expect(await shownAfter("wreck a…")).toEqual(["wreck a", ""]);
    expect(await shownAfter("recognise…", " speech…")).toEqual(["recognise speech", ""]);
    expect(await shownAfter("Recognise speech", " in…")).toEqual(["in", "Recognise speech"]);
    expect(await shownAfter(" in time")).toEqual([undefined, "Recognise speech in time"]);
    expect(await shownAfter(" and…")).toEqual(["and", "Recognise speech in time"]);
    recognition.onend();
    await settle();
    expect([interim(), chat.prefill.text.value]).toEqual([undefined, "Recognise speech in time"]);
  });

  test("VoiceButton drops the words of an unfinished phrase when the message is sent", async () => {
    await show();
    const recognition = await listen();
    recognition.recognise("Hello", " you…");
    await settle();
    chat.prefill.text.value = "";
    await settle();
    expect(document.querySelector(".voice-interim")).toBeNull();
    recognition.recognise("late…");
    await settle();
    expect(document.querySelector(".voice-interim")).toBeNull();
  });

  test("VoiceButton stops listening when the message is sent or the conversation changes", async () => {
    await show();
    const first = await listen();
    first.recognise("Hello");
    await settle();
    chat.prefill.text.value = "";
    await settle();
    expect([first.calls.at(-1), pressed()]).toEqual(["abort", "false"]);
    first.recognise("late");
    expect(chat.prefill.text.value).toBe("");
    const second = await listen();
    chat.thread.value = new Chat("ws://test/v1/responses").thread.value;
    await settle();
    expect([second.calls.at(-1), pressed()]).toEqual(["abort", "false"]);
  });

  test.each([
    ["not-allowed", ["The browser does not allow this page to use the microphone."]],
    ["something-new", ["Dictation failed."]],
    ["no-speech", []],
  ])("VoiceButton names the error %s", async (error, expected) => {
    await show();
    const recognition = await listen();
    recognition.onerror({ error });
    recognition.onend();
    await settle();
    expect(pressed()).toBe("false");
    expect(toasts.value.map(({ text }) => text)).toEqual(expected);
  });

  test("VoiceButton recognises on the device if the browser can", async () => {
    FakeRecognition.local = "available";
    await show();
    expect((await listen()).processLocally).toBe(true);
  });
});
