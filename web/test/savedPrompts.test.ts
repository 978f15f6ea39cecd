// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { Chat } from "../src/chat/chat";
import { fillVariables } from "../src/server/savedPrompts";
import { ChatContext } from "../src/ui/context";
import { type FakeServer, fakeNetwork } from "./fakes";

describe("fillVariables", () => {
  test.each([
    ["Into {{language}}: {{ text }}", { language: "French", text: "Hi" }, "Into French: Hi"],
    ["{{a}} {{a}} {{b}}", { a: "$& {{b}}" }, "$& {{b}} $& {{b}} {{b}}"],
    ["{{two words}} {{}} {x}", { "two words": "", x: "y" }, " {{}} {x}"],
  ])("fillVariables puts values into %j", (text, values, expected) =>
    expect(fillVariables(text, new Map(Object.entries(values)))).toBe(expected),
  );
});

const PROMPTS = [
  { name: "fix", text: "Fix this:", description: "Finds errors", variables: [] },
  { name: "translate", text: "Into {{language}}: {{text}}", description: "", variables: ["language", "text"] },
];

describe("prompt menu", () => {
  let chat: Chat;
  let server: FakeServer;
  let root: HTMLElement;

  beforeEach(async () => {
    vi.stubGlobal("matchMedia", () => ({ matches: false }));
    server = fakeNetwork();
    server.replies["/v1/prompts"] = { data: PROMPTS };
    HTMLDialogElement.prototype.showModal = function () {
      this.open = true;
    };
    HTMLDialogElement.prototype.close = function () {
      this.open = false;
    };
    chat = new Chat("ws://test/v1/responses");
    const { Composer } = await import("../src/ui/Composer");
    root = document.body.appendChild(document.createElement("div"));
    render(h(ChatContext.Provider, { value: chat }, h(Composer, null)), root);
  });
  afterEach(() => {
    render(null, root);
    root.remove();
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  const box = () => root.querySelector("textarea")!;
  const labels = () => [...root.querySelectorAll("[role=option] b")].map((option) => option.textContent);
  const selected = () => root.querySelector("[aria-selected=true] b")?.textContent;

  async function settle(): Promise<void> {
    await vi.dynamicImportSettled();
    await vi.advanceTimersByTimeAsync(100);
  }
  async function write(text: string): Promise<void> {
    box().value = text;
    box().dispatchEvent(new InputEvent("input", { bubbles: true }));
    await settle();
    await settle();
  }
  async function press(key: string, at: HTMLElement = box()): Promise<void> {
    at.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await settle();
  }

  test("a slash at the start offers the prompts, and their editing", async () => {
    await write("a /");
    expect(server.calls).toEqual([]);
    await write("/");
    expect(labels()).toEqual(["/fix", "/translate", "Edit saved prompts…"]);
    expect(box().getAttribute("aria-activedescendant")).toBe(root.querySelector("[aria-selected=true]")!.id);
    await press("ArrowUp");
    await press("Enter");
    const { dialog } = await import("../src/ui/navigation");
    expect([dialog.value, box().value, labels()]).toEqual(["prompts", "", []]);
    expect(box().hasAttribute("aria-activedescendant")).toBe(false);
    dialog.value = null;
  });

  test("Enter inserts the selected prompt", async () => {
    await write("/");
    await press("ArrowDown");
    expect(selected()).toBe("/translate");
    await write("/i");
    await write("/");
    expect(selected(), "the best match of another text").toBe("/fix");
    await press("Enter");
    expect(box().value).toBe("Fix this:");
  });

  test("variables are asked for, and their values inserted", async () => {
    await write("/tr");
    expect(labels()).toEqual(["/translate"]);
    await press("Enter");
    const fields = [...root.querySelectorAll<HTMLTextAreaElement>("dialog textarea")];
    expect(fields.map(({ name }) => name)).toEqual(["language", "text"]);
    fields[0]!.value = "French";
    await press("Enter", fields[0]);
    expect(root.querySelector("dialog"), "a value is missing").not.toBeNull();
    fields[1]!.value = "Hello";
    await press("Enter", fields[1]);
    expect([box().value, root.querySelector("dialog")]).toEqual(["Into French: Hello", null]);
  });

  test("Escape hides the prompts and stops no answer, and Enter after an unknown name sends it", async () => {
    const onKey = vi.fn();
    root.addEventListener("keydown", onKey);
    await write("/fix");
    await press("Escape");
    expect([labels(), onKey.mock.calls.length]).toEqual([[], 0]);
    await write("/f");
    expect(labels()).toEqual(["/fix"]);
    await write("/nothing");
    await press("Enter");
    expect(onKey).toHaveBeenCalledOnce();
  });
});
