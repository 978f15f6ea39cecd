import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import {
  allPrompts,
  choosePrompt,
  customPrompts,
  findPrompt,
  removePrompt,
  restorePrompt,
  savePrompt,
} from "../src/app/prompts";
import { systemPrompt } from "../src/app/settings";
import { fakeBrowser } from "./fakes";

describe("custom prompts", () => {
  beforeEach(() => {
    fakeBrowser();
    customPrompts.value = [];
  });
  afterEach(() => vi.unstubAllGlobals());

  it("are stored in the browser under unique names", () => {
    expect(savePrompt(" Poet ", "Be a poet.")).toBeNull();
    expect(findPrompt("Be a poet.")?.name).toBe("Poet");
    expect(savePrompt("poet", "Another")).toContain("Poet");
    expect(savePrompt("Plain", "Another")).toContain("Plain");
    expect(savePrompt("", "x")).not.toBeNull();
    expect(savePrompt("x", " ")).not.toBeNull();
    expect(JSON.parse(localStorage.getItem("chatcache.prompts")!)).toEqual([{ name: "Poet", text: "Be a poet." }]);
  });

  it("are preferred to a built-in prompt with the same text", () => {
    expect(findPrompt("Be brief.")?.name).toBe("Brief");
    savePrompt("Mine", "Be brief.");
    expect(findPrompt("Be brief.")?.name).toBe("Mine");
    const brief = allPrompts.value.find(({ name }) => name === "Brief")!;
    choosePrompt(brief);
    expect([findPrompt("Be brief."), systemPrompt.value]).toEqual([brief, "Be brief."]);
  });

  it("are edited in place, deleted and restored", () => {
    savePrompt("A", "a");
    savePrompt("B", "b");
    expect(savePrompt("A2", "a2", customPrompts.value[0])).toBeNull();
    const [a, b] = customPrompts.value;
    expect([a!.text, b!.text]).toEqual(["a2", "b"]);
    removePrompt(a!);
    expect(allPrompts.value).not.toContain(a);
    restorePrompt(a!, 0);
    expect(customPrompts.value).toEqual([a, b]);
  });
});
