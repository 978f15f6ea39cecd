// Ready-made system prompts and conversation starters. They suit the built-in model; any other model takes them too.

import { computed, signal } from "@preact/signals";
import { load, save } from "./browser";

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

// ---- System prompts with names: ready-made ones, and the reader's own, kept in this browser.

const MAX_NAME_CHARS = 40;

export const customPrompts = signal<readonly Preset[]>(loadPrompts());
export const allPrompts = computed<readonly Preset[]>(() => [...PRESETS, ...customPrompts.value]);

/** The prompt with this text, if it has a name. */
export function findPrompt(text: string): Preset | undefined {
  return allPrompts.value.find((preset) => preset.text === text);
}

export function isCustom(preset: Preset): boolean {
  return customPrompts.value.includes(preset);
}

/** Keep a prompt under a name, in the place of `old` where one is edited. Returns what is wrong, or null. */
export function savePrompt(name: string, text: string, old: Preset | null = null): string | null {
  const preset = { name: name.trim().slice(0, MAX_NAME_CHARS), text };
  if (preset.name === "") return "It needs a name.";
  if (text.trim() === "") return "It needs a text.";
  const taken = allPrompts.value.find(
    (other) => other !== old && other.name.toLowerCase() === preset.name.toLowerCase(),
  );
  if (taken) return `There is one called ${taken.name} already.`;
  storePrompts(
    old && isCustom(old)
      ? customPrompts.value.map((other) => (other === old ? preset : other))
      : [...customPrompts.value, preset],
  );
  return null;
}

export function removePrompt(preset: Preset): void {
  storePrompts(customPrompts.value.filter((other) => other !== preset));
}

export function restorePrompt(preset: Preset, place: number): void {
  storePrompts(customPrompts.value.toSpliced(place, 0, preset));
}

function storePrompts(presets: readonly Preset[]): void {
  customPrompts.value = presets;
  save("prompts", presets);
}

function loadPrompts(): readonly Preset[] {
  const found = load<unknown>("prompts", []);
  if (!Array.isArray(found)) return [];
  return found.filter((entry): entry is Preset => {
    const { name, text } = (entry ?? {}) as Partial<Preset>;
    return typeof name === "string" && typeof text === "string" && name !== "";
  });
}
