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

export type StarterFeature = "candidates" | "beams" | "fork" | "memory" | "persona" | "pages";

export interface Starter {
  readonly title: string;
  readonly feature: StarterFeature;
  readonly badge?: string;
  readonly prompt: string;
  readonly description: string;
  readonly sampling?: Partial<Sampling>;
  readonly system?: string;
  readonly followUps?: readonly string[];
  readonly panel?: "beams" | "pages"; // opened beside it
}

const SINGLE_ANSWER: Partial<Sampling> = { search: "sample", n: 1 };

export const STARTERS: readonly Starter[] = [
  {
    title: "Four stories",
    feature: "candidates",
    badge: "4 answers",
    prompt: "Tell me a story about a dragon",
    description: "n = 4: the prompt is computed once, then forks into four answers. Pick the one you like.",
    sampling: { search: "sample", n: 4, temperature: 1 },
  },
  {
    title: "A search, live",
    feature: "beams",
    badge: "5 beams",
    prompt: "Tell me a story about a robot",
    description: "Beam search grows a tree of texts: what all agree on is solid, what is still open is a ghost.",
    sampling: { search: "beam", n: 5 },
    panel: "beams",
  },
  {
    title: "Fork at a word",
    feature: "fork",
    prompt: "Tell me a story about a fox",
    description: "Then click a word: what else could stand there, how likely it was, and a branch from it.",
    sampling: SINGLE_ANSWER,
  },
  {
    title: "Remember me",
    feature: "memory",
    badge: "2 turns",
    prompt: "My name is Ada.",
    description: "Then ask for it. The second turn reuses the pages of the first: watch the bar under the answer.",
    sampling: SINGLE_ANSWER,
    followUps: ["What is my name?"],
  },
  {
    title: "Talk like a pirate",
    feature: "persona",
    badge: "Pirate",
    prompt: "Who are you?",
    description: "A system prompt is shared: every chat that uses it starts from the same pages.",
    sampling: SINGLE_ANSWER,
    system: "Pirate",
  },
  {
    title: "Under the hood",
    feature: "pages",
    prompt: "What is a KV page?",
    description: "The idea that this server is built on, with the map of all its pages beside the answer.",
    sampling: SINGLE_ANSWER,
    panel: "pages",
  },
];
