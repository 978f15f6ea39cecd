// Named system prompts: built-in presets, and custom prompts stored in this browser. The texts that users insert into
// messages and share are `server/savedPrompts.ts`.

import { computed, signal } from "@preact/signals";
import { load, save } from "./browser";
import { systemPrompt } from "./settings";

export interface Preset {
  readonly name: string;
  readonly text: string;
}

export const PRESETS: readonly Preset[] = [
  { name: "Plain", text: "" },
  { name: "Brief", text: "Be brief." },
  { name: "Pirate", text: "Talk like a pirate." },
  { name: "Shout", text: "Always answer in capital letters." },
  { name: "Whisper", text: "Use only lowercase letters." },
  { name: "Butler", text: "You are a polite butler." },
];

const MAX_NAME_CHARS = 40;

export const customPrompts = signal<readonly Preset[]>(loadPrompts());
export const allPrompts = computed<readonly Preset[]>(() => [...PRESETS, ...customPrompts.value]);

const chosen = signal<Preset | null>(null); // the last choice, which another prompt may have the text of

/** Return the prompt with this text, if there is one: of several the chosen one, otherwise a custom one. */
export function findPrompt(text: string): Preset | undefined {
  const found = allPrompts.value.filter((preset) => preset.text === text);
  return found.find((preset) => preset === chosen.value) ?? found.at(-1);
}

/** Use a prompt as the system prompt. */
export function choosePrompt(preset: Preset): void {
  chosen.value = preset;
  systemPrompt.value = preset.text;
}

export function isCustom(preset: Preset): boolean {
  return customPrompts.value.includes(preset);
}

/** Save a prompt and choose it; `old` is replaced if given. Returns an error message, or null. */
export function savePrompt(name: string, text: string, old: Preset | null = null): string | null {
  const preset = { name: name.trim().slice(0, MAX_NAME_CHARS), text };
  if (preset.name === "") return "Enter a name.";
  if (text.trim() === "") return "Enter a text.";
  const taken = allPrompts.value.find(
    (other) => other !== old && other.name.toLowerCase() === preset.name.toLowerCase(),
  );
  if (taken) return `A prompt named ${taken.name} already exists.`;
  storePrompts(
    old && isCustom(old)
      ? customPrompts.value.map((other) => (other === old ? preset : other))
      : [...customPrompts.value, preset],
  );
  choosePrompt(preset);
  return null;
}

export function removePrompt(preset: Preset): void {
  storePrompts(customPrompts.value.filter((other) => other !== preset));
}

export function restorePrompt(preset: Preset, index: number): void {
  storePrompts(customPrompts.value.toSpliced(index, 0, preset));
}

function storePrompts(presets: readonly Preset[]): void {
  customPrompts.value = presets;
  save("prompts", presets);
}

function loadPrompts(): readonly Preset[] {
  const entries = load<unknown>("prompts", []);
  if (!Array.isArray(entries)) return [];
  return entries.filter((entry): entry is Preset => {
    const { name, text } = (entry ?? {}) as Partial<Preset>;
    return typeof name === "string" && typeof text === "string" && name !== "";
  });
}
