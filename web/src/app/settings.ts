// What the reader chose. How to look is kept in this browser; how to answer belongs to the shown conversation, and the
// browser keeps what a new one starts with.

import { batch, effect, signal } from "@preact/signals";
import { load, save } from "./browser";

export type Theme = "system" | "light" | "dark";
export type Search = "sample" | "beam";

export interface Sampling {
  readonly search: Search;
  readonly n: number; // candidates, or beams
  readonly temperature: number;
  readonly topP: number;
  readonly maxTokens: number; // 0: as many as the context holds
  readonly seed: number | null;
}

export const MAX_N = 8;
export const DEFAULT_SAMPLING: Sampling = {
  search: "sample",
  n: 1,
  temperature: 0.8,
  topP: 0.95,
  maxTokens: 0,
  seed: null,
};

export const theme = signal<Theme>(load("theme", "system"));
export const showStats = signal<boolean>(load("stats", true));
export const prefillWhileTyping = signal<boolean>(load("draftAhead", true)); // prefill while the reader types
export const clickForAlternatives = signal<boolean>(load("wordForks", true)); // a click on a word shows its alternatives
/** The model names a conversation after its first answer; null: nobody chose, so it does if it can. */
export const autoTitle = signal<boolean | null>(load("titles", null));
const BUILTIN_MODEL = "chatcache-builtin"; // tells stories, but cannot say what they are about

export function shouldAutoTitle(model: string | undefined): boolean {
  return autoTitle.value ?? model !== BUILTIN_MODEL;
}

/** What a new conversation starts with. */
export const defaultSampling = signal<Sampling>(parseSampling(load("sampling", {})));
export const defaultSystem = signal<string>(load<string>("system", ""));

/** Of the shown conversation. */
export const sampling = signal<Sampling>(defaultSampling.peek());
export const systemPrompt = signal<string>(defaultSystem.peek());

export function setSampling(change: Partial<Sampling>): void {
  sampling.value = { ...sampling.value, ...change };
}

/** Answer as a new conversation is answered. */
export function startFromDefaults(): void {
  batch(() => {
    sampling.value = defaultSampling.value;
    systemPrompt.value = defaultSystem.value;
  });
}

/** Let new conversations start as this one is answered. */
export function makeDefaults(): void {
  batch(() => {
    defaultSampling.value = sampling.value;
    defaultSystem.value = systemPrompt.value;
  });
}

export function sameSampling(a: Sampling, b: Sampling): boolean {
  return (Object.keys(DEFAULT_SAMPLING) as (keyof Sampling)[]).every((name) => a[name] === b[name]);
}

/** Write every change back, and put the theme on the root element. Call once. */
export function persistSettings(): void {
  effect(() => save("system", defaultSystem.value));
  effect(() => save("sampling", defaultSampling.value));
  effect(() => save("stats", showStats.value));
  effect(() => save("draftAhead", prefillWhileTyping.value));
  effect(() => save("wordForks", clickForAlternatives.value));
  effect(() => save("titles", autoTitle.value));
  effect(() => {
    save("theme", theme.value);
    if (theme.value === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme.value;
  });
}

/** Settings that somebody else may have written: what makes no sense is as it is by default. */
export function parseSampling(value: unknown): Sampling {
  const given = (typeof value === "object" && value !== null ? value : {}) as Partial<Record<keyof Sampling, unknown>>;
  const number = (name: keyof Sampling, min: number, max: number): number => {
    const found = given[name];
    const fallback = DEFAULT_SAMPLING[name] as number;
    return typeof found === "number" && Number.isFinite(found) ? Math.min(max, Math.max(min, found)) : fallback;
  };
  return {
    search: given.search === "beam" ? "beam" : "sample",
    n: Math.round(number("n", 1, MAX_N)),
    temperature: number("temperature", 0, 2),
    topP: number("topP", 0.01, 1),
    maxTokens: Math.round(number("maxTokens", 0, 2 ** 31)),
    seed: typeof given.seed === "number" && Number.isSafeInteger(given.seed) ? Math.max(0, given.seed) : null,
  };
}
