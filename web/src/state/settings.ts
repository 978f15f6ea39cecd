// What the reader chose, kept in this browser: how to sample, how to behave, how to look.
import { effect, signal } from "@preact/signals";

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
  search: "sample", n: 1, temperature: 0.8, topP: 0.95, maxTokens: 0, seed: null,
};

const PREFIX = "chatcache.";

export const theme = signal<Theme>(load("theme", "system"));
export const systemPrompt = signal<string>(load("system", ""));
export const sampling = signal<Sampling>({ ...DEFAULT_SAMPLING, ...load<Partial<Sampling>>("sampling", {}) });
export const showStats = signal<boolean>(load("stats", true));
export const draftAhead = signal<boolean>(load("draftAhead", true)); // prefill while the reader types
export const wordForks = signal<boolean>(load("wordForks", true)); // a click on a word shows its alternatives

export function setSampling(change: Partial<Sampling>): void {
  sampling.value = { ...sampling.value, ...change };
}

/** Write every change back, and put the theme on the root element. Call once. */
export function keepSettings(): void {
  effect(() => save("system", systemPrompt.value));
  effect(() => save("sampling", sampling.value));
  effect(() => save("stats", showStats.value));
  effect(() => save("draftAhead", draftAhead.value));
  effect(() => save("wordForks", wordForks.value));
  effect(() => {
    save("theme", theme.value);
    if (theme.value === "system") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = theme.value;
  });
}

function load<T>(name: string, fallback: T): T {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : (JSON.parse(text) as T);
  } catch {
    return fallback; // storage is off, or was written by something else
  }
}

function save(name: string, value: unknown): void {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is off: the choice lasts as long as the tab
  }
}
