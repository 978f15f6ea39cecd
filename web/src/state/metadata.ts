// What the page keeps in a conversation's metadata: its system prompt, how to sample, whether it is pinned.
// Values there hold 512 characters, so a longer prompt takes several. Entries of other clients are left alone.
import { parseSampling, type Sampling } from "./settings";

export type Metadata = Readonly<Record<string, string>>;

/** How a conversation wants to be answered. */
export interface ConversationSettings {
  readonly system: string;
  readonly sampling: Sampling | null; // null: as the reader's defaults have it
}

const VALUE_CHARS = 512;
const SYSTEM_PARTS = 8;
export const MAX_SYSTEM_CHARS = VALUE_CHARS * SYSTEM_PARTS;

const systemKey = (part: number) => (part === 0 ? "system" : `system_${part + 1}`);

export function readSettings(metadata: Metadata | null | undefined): ConversationSettings {
  let system = "";
  for (let part = 0; part < SYSTEM_PARTS; part++) system += metadata?.[systemKey(part)] ?? "";
  return { system, sampling: readSampling(metadata?.["sampling"]) };
}

/** The metadata with this profile in it; a prompt too long to keep is left out. */
export function withSettings(metadata: Metadata | null | undefined, profile: ConversationSettings): Metadata {
  const next: Record<string, string> = { ...metadata };
  for (let part = 0; part < SYSTEM_PARTS; part++) delete next[systemKey(part)];
  delete next["sampling"];
  const chars = [...profile.system]; // by code points: half a character would be no text
  if (chars.length <= MAX_SYSTEM_CHARS) {
    for (let part = 0; part * VALUE_CHARS < chars.length; part++) {
      next[systemKey(part)] = chars.slice(part * VALUE_CHARS, (part + 1) * VALUE_CHARS).join("");
    }
  }
  if (profile.sampling) next["sampling"] = JSON.stringify(profile.sampling);
  return next;
}

export function isPinned(metadata: Metadata | null | undefined): boolean {
  return metadata?.["pinned"] === "true";
}

export function withPin(metadata: Metadata | null | undefined, pinned: boolean): Metadata {
  const { pinned: _, ...rest } = metadata ?? {};
  return pinned ? { ...rest, pinned: "true" } : rest;
}

export function sameMetadata(a: Metadata | null | undefined, b: Metadata | null | undefined): boolean {
  const text = (metadata: Metadata | null | undefined) =>
    JSON.stringify(Object.entries(metadata ?? {}).sort(([x], [y]) => (x < y ? -1 : 1)));
  return text(a) === text(b);
}

/** Settings that another client may have written: what makes no sense is as it is by default. */
function readSampling(text: string | undefined): Sampling | null {
  if (text === undefined) return null;
  try {
    return parseSampling(JSON.parse(text));
  } catch {
    return null;
  }
}
