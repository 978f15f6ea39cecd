// Ready-made system prompts and conversation starters. They suit the built-in model; any other model takes them too.
import type { Sampling } from "./settings";

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

export interface Starter {
  readonly title: string;
  readonly ask: string;
  readonly why: string;
  readonly sampling?: Partial<Sampling>;
  readonly system?: string;
  readonly next?: readonly string[];
}

export const STARTERS: readonly Starter[] = [
  {
    title: "Four stories",
    ask: "Tell me a story about a dragon",
    why: "n = 4: the prompt is computed once, then forks into four answers. Pick the one you like.",
    sampling: { n: 4, temperature: 1 },
  },
  {
    title: "A name to remember",
    ask: "My name is Ada.",
    why: "Then ask for it. The second turn reuses the pages of the first: watch the bar under the answer.",
    sampling: { n: 1 },
    next: ["What is my name?"],
  },
  { title: "A little arithmetic", ask: "What is 27 + 48?", why: "Then press regenerate: the prompt is already there, only the answer is new.", sampling: { n: 1 } },
  {
    title: "A tiny program",
    ask: "Write Python code that prints hello",
    why: "Code arrives with colours and a copy button.",
    sampling: { n: 1 },
  },
  {
    title: "Talk like a pirate",
    ask: "Who are you?",
    why: "A system prompt is shared: every chat that uses it starts from the same pages.",
    sampling: { n: 1 },
    system: "Pirate",
  },
  { title: "Under the hood", ask: "What is a KV page?", why: "The idea that this whole server is built on.", sampling: { n: 1 } },
];
