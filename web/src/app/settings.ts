// User settings. Display settings are stored in the browser; sampling and system prompt belong to the shown
// conversation, and the browser stores the defaults for new conversations.

import { batch, effect, signal } from "@preact/signals";
import { load, save } from "./browser";
import { DEFAULT_RARE, parseRare, type RareSampling } from "./rareSampling";

export type Theme = "system" | "light" | "dark";
export type Search = "sample" | "beam";

export interface Sampling extends RareSampling {
  readonly search: Search;
  readonly n: number; // number of candidates, or of beams
  readonly temperature: number;
  readonly topP: number;
  readonly topK: number; // 0: all tokens
  readonly minP: number;
  readonly presencePenalty: number;
  readonly frequencyPenalty: number;
  readonly repetitionPenalty: number; // 1: none
  readonly stop: string; // texts that end an answer, one per line
  readonly maxTokens: number; // 0: limited by the context only
  readonly seed: number | null;
  readonly schema: string; // JSON schema that answers match; "": none
  readonly replyStart: string; // every answer begins with this text
  readonly toolServers: readonly string[]; // MCP servers whose tools the model may call
}

export const MAX_N = 8;
export const MAX_REPLY_START = 160;
export const MAX_STOP_CHARS = 160;
export const MAX_SCHEMA_CHARS = 1000;
export const MAX_STOPS = 16; // of the server
export const MAX_TOP_K = 1000;
const MAX_TOOL_SERVERS = 32; // of the operator
export const DEFAULT_SAMPLING: Sampling = {
  search: "sample",
  n: 1,
  temperature: 0.8,
  topP: 0.95,
  topK: 0,
  minP: 0,
  presencePenalty: 0,
  frequencyPenalty: 0,
  repetitionPenalty: 1,
  stop: "",
  maxTokens: 0,
  seed: null,
  schema: "",
  replyStart: "",
  toolServers: [],
  ...DEFAULT_RARE,
};

export const theme = signal<Theme>(load("theme", "system"));
export const showStats = signal<boolean>(load("stats", true));
export const prefillWhileTyping = signal<boolean>(load("draftAhead", true));
export const clickForAlternatives = signal<boolean>(load("wordForks", true));
/** Generate a title after the first answer; null: not chosen, so it depends on the model. */
export const autoTitle = signal<boolean | null>(load("titles", null));
const BUILTIN_MODEL = "chatcache-builtin"; // its generated titles are not useful

export function shouldAutoTitle(model: string | undefined): boolean {
  return autoTitle.value ?? model !== BUILTIN_MODEL;
}

/** Defaults for new conversations. */
export const defaultSampling = signal<Sampling>(parseSampling(load("sampling", {})));
export const defaultSystem = signal<string>(load<string>("system", ""));

/** Settings of the shown conversation. */
export const sampling = signal<Sampling>(defaultSampling.peek());
export const systemPrompt = signal<string>(defaultSystem.peek());

export function setSampling(change: Partial<Sampling>): void {
  sampling.value = { ...sampling.value, ...change };
}

/** Make the settings of this conversation the defaults. */
export function makeDefaults(): void {
  batch(() => {
    defaultSampling.value = sampling.value;
    defaultSystem.value = systemPrompt.value;
  });
}

export function sameSampling(a: Sampling, b: Sampling): boolean {
  const names = Object.keys(DEFAULT_SAMPLING) as (keyof Sampling)[];
  return names.every((name) => a[name] === b[name] || JSON.stringify(a[name]) === JSON.stringify(b[name]));
}

/** Whether the settings of this conversation are the defaults. */
export function hasDefaults(): boolean {
  return sameSampling(sampling.value, defaultSampling.value) && systemPrompt.value === defaultSystem.value;
}

/** Persist every change, and set the theme on the root element. Call once. */
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

/** Return the texts that end an answer. */
export function stopTexts({ stop }: Sampling): readonly string[] {
  return [...new Set(stop.split("\n").filter((line) => line !== ""))];
}

type JsonObject = Readonly<Record<string, unknown>>;

/** Return the schema that answers match, or why the text is none; both null without a text. */
export function parseSchema({ schema }: Pick<Sampling, "schema">): {
  readonly value: JsonObject | null;
  readonly error: string | null;
} {
  if (schema.trim() === "") return { value: null, error: null };
  try {
    const value: unknown = JSON.parse(schema);
    if (typeof value === "object" && value !== null && !Array.isArray(value))
      return { value: value as JsonObject, error: null };
  } catch (error) {
    return { value: null, error: `This is not JSON: ${(error as Error).message}` };
  }
  return { value: null, error: 'A schema is an object, such as {"type": "object"}.' };
}

/** Validate stored settings, which another client may have written; invalid values become the default. */
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
    topK: Math.round(number("topK", 0, MAX_TOP_K)),
    minP: number("minP", 0, 1),
    presencePenalty: number("presencePenalty", -2, 2),
    frequencyPenalty: number("frequencyPenalty", -2, 2),
    repetitionPenalty: number("repetitionPenalty", 0.5, 2),
    stop: typeof given.stop === "string" ? given.stop.slice(0, MAX_STOP_CHARS) : "",
    maxTokens: Math.round(number("maxTokens", 0, 2 ** 31)),
    seed: typeof given.seed === "number" && Number.isSafeInteger(given.seed) ? Math.max(0, given.seed) : null,
    schema: typeof given.schema === "string" ? given.schema.slice(0, MAX_SCHEMA_CHARS) : "",
    replyStart: typeof given.replyStart === "string" ? given.replyStart.slice(0, MAX_REPLY_START) : "",
    toolServers: (Array.isArray(given.toolServers) ? given.toolServers : [])
      .filter((name): name is string => typeof name === "string" && /^[\w-]{1,64}$/.test(name))
      .slice(0, MAX_TOOL_SERVERS),
    ...parseRare(value),
  };
}
