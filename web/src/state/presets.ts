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

export type Shows = "candidates" | "beams" | "fork" | "memory" | "persona" | "pages";

export interface Starter {
  readonly title: string;
  readonly shows: Shows;
  readonly badge?: string;
  readonly ask: string;
  readonly why: string;
  readonly sampling?: Partial<Sampling>;
  readonly system?: string;
  readonly next?: readonly string[];
  readonly panel?: "beams" | "pages"; // opened beside it
}

const ONE: Partial<Sampling> = { search: "sample", n: 1 };

export const STARTERS: readonly Starter[] = [
  {
    title: "Four stories",
    shows: "candidates",
    badge: "4 answers",
    ask: "Tell me a story about a dragon",
    why: "n = 4: the prompt is computed once, then forks into four answers. Pick the one you like.",
    sampling: { search: "sample", n: 4, temperature: 1 },
  },
  {
    title: "A search, live",
    shows: "beams",
    badge: "5 beams",
    ask: "Tell me a story about a robot",
    why: "Beam search grows a tree of texts: what all agree on is solid, what is still open is a ghost.",
    sampling: { search: "beam", n: 5 },
    panel: "beams",
  },
  {
    title: "Fork at a word",
    shows: "fork",
    ask: "Tell me a story about a fox",
    why: "Then click a word: what else could stand there, how likely it was, and a branch from it.",
    sampling: ONE,
  },
  {
    title: "Remember me",
    shows: "memory",
    badge: "2 turns",
    ask: "My name is Ada.",
    why: "Then ask for it. The second turn reuses the pages of the first: watch the bar under the answer.",
    sampling: ONE,
    next: ["What is my name?"],
  },
  {
    title: "Talk like a pirate",
    shows: "persona",
    badge: "Pirate",
    ask: "Who are you?",
    why: "A system prompt is shared: every chat that uses it starts from the same pages.",
    sampling: ONE,
    system: "Pirate",
  },
  {
    title: "Under the hood",
    shows: "pages",
    ask: "What is a KV page?",
    why: "The idea that this server is built on, with the map of all its pages beside the answer.",
    sampling: ONE,
    panel: "pages",
  },
];
