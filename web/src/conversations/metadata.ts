// The metadata that the page stores in a conversation: system prompt, sampling, pinned flag. A value holds at most
// 512 characters, so a longer text is split over several keys. Keys of other clients are kept.

import { batch } from "@preact/signals";
import type { WireConversation } from "../api/frames";
import { withoutDefaults } from "../app/rareSampling";
import {
  DEFAULT_SAMPLING,
  defaultSampling,
  defaultSystem,
  parseSampling,
  type Sampling,
  sameSampling,
  sampling,
  systemPrompt,
} from "../app/settings";

export type Metadata = Readonly<Record<string, string>>;

/** System prompt and sampling of a conversation. */
export interface ConversationSettings {
  readonly system: string;
  readonly sampling: Sampling | null; // null: the defaults of the browser
}

const VALUE_CHARS = 512;
const SYSTEM_PARTS = 8;
const SAMPLING_PARTS = 6;
export const MAX_SYSTEM_CHARS = VALUE_CHARS * SYSTEM_PARTS;

const keyOf = (name: string, part: number) => (part === 0 ? name : `${name}_${part + 1}`);

function readText(metadata: Metadata | null | undefined, name: string, parts: number): string {
  let text = "";
  for (let part = 0; part < parts; part++) text += metadata?.[keyOf(name, part)] ?? "";
  return text;
}

/** Replace a text; one that is too long for its parts is left out. */
function writeText(metadata: Record<string, string>, name: string, parts: number, text: string): void {
  const chars = [...text]; // by code points, so that no surrogate pair is split
  for (let part = 0; part < parts; part++) {
    delete metadata[keyOf(name, part)];
    const piece = chars.slice(part * VALUE_CHARS, (part + 1) * VALUE_CHARS).join("");
    if (piece !== "" && chars.length <= parts * VALUE_CHARS) metadata[keyOf(name, part)] = piece;
  }
}

export function readSettings(metadata: Metadata | null | undefined): ConversationSettings {
  const system = readText(metadata, "system", SYSTEM_PARTS);
  return { system, sampling: readSampling(readText(metadata, "sampling", SAMPLING_PARTS)) };
}

const samplingText = (sampling: Sampling) => JSON.stringify(withoutDefaults(sampling));

/** Whether the settings are too long to be stored with a conversation. */
export function isTooLongToStore(sampling: Sampling): boolean {
  return [...samplingText(sampling)].length > SAMPLING_PARTS * VALUE_CHARS;
}

/** Return the metadata with these settings; a prompt over the limit is left out. */
export function withSettings(metadata: Metadata | null | undefined, settings: ConversationSettings): Metadata {
  const next: Record<string, string> = { ...metadata };
  writeText(next, "system", SYSTEM_PARTS, settings.system);
  writeText(next, "sampling", SAMPLING_PARTS, settings.sampling ? samplingText(settings.sampling) : "");
  return next;
}

export function isPinned(metadata: Metadata | null | undefined): boolean {
  return metadata?.pinned === "true";
}

export function withPin(metadata: Metadata | null | undefined, pinned: boolean): Metadata {
  const { pinned: _, ...rest } = metadata ?? {};
  return pinned ? { ...rest, pinned: "true" } : rest;
}

export function sameMetadata(a: Metadata | null | undefined, b: Metadata | null | undefined): boolean {
  return Object.keys({ ...a, ...b }).every((key) => a?.[key] === b?.[key]);
}

/** Read sampling settings, which another client may have written. */
function readSampling(text: string): Sampling | null {
  if (text === "") return null;
  try {
    return parseSampling(JSON.parse(text));
  } catch {
    return null;
  }
}

// -- Synchronisation of the settings of the shown conversation with its metadata, with a short delay

const SAVE_DELAY_MS = 400; // sliders change often

interface PendingSave {
  readonly id: string;
  readonly settings: ConversationSettings;
  readonly timer: ReturnType<typeof setTimeout>;
}

/** The part of the conversation list that `SettingsSync` writes to. */
interface MetadataWriter {
  changeMetadata(id: string, change: (metadata: Metadata | null | undefined) => Metadata): Promise<void>;
}

export class SettingsSync {
  private pending: PendingSave | null = null;
  private writing = Promise.resolve();
  private readonly unsaved = new Map<string, ConversationSettings>(); // by conversation, while they are being saved
  private savedState = ""; // the settings that are stored already, as JSON

  constructor(private readonly conversations: MetadataWriter) {
    addEventListener("pagehide", () => void this.flush());
  }

  /** Apply the settings of a conversation: those being saved, or the stored ones. */
  apply(head: WireConversation | undefined): void {
    this.show(this.unsaved.get(head?.id ?? "") ?? readSettings(head?.metadata));
  }

  /** Apply the settings that a new conversation was left with, or the defaults. */
  applyNew(left: ConversationSettings | null): void {
    void this.flush();
    this.show(left ?? { system: defaultSystem.value, sampling: null });
  }

  private show({ system, sampling: stored }: ConversationSettings): void {
    this.savedState = "applying";
    batch(() => {
      systemPrompt.value = system;
      sampling.value = stored ?? defaultSampling.value;
    });
    this.savedState = JSON.stringify(currentSettings());
  }

  /** Store the settings of a conversation that has just been created: the current ones, or those it was left with. */
  attach(id: string, left: ConversationSettings | null): void {
    const settings = left ?? currentSettings();
    if (!left) this.savedState = JSON.stringify(settings);
    this.writing = this.write(id, settings);
  }

  /** Schedule saving the settings if they changed. */
  scheduleSave(id: string | null): void {
    if (this.savedState === "applying") return;
    if (this.pending && this.pending.id !== id) void this.flush();
    if (this.pending) clearTimeout(this.pending.timer);
    this.pending = null;
    const settings = currentSettings();
    if (id === null || JSON.stringify(settings) === this.savedState) return;
    this.pending = { id, settings, timer: setTimeout(() => void this.flush(), SAVE_DELAY_MS) };
  }

  /** Save pending changes now, and wait until all are saved. */
  flush(): Promise<void> {
    if (this.pending) {
      const { id, settings, timer } = this.pending;
      clearTimeout(timer);
      this.pending = null;
      this.savedState = JSON.stringify(settings);
      this.writing = this.write(id, settings);
    }
    return this.writing;
  }

  private async write(id: string, settings: ConversationSettings): Promise<void> {
    this.unsaved.set(id, settings);
    await this.conversations.changeMetadata(id, (metadata) => withSettings(metadata, settings));
    if (this.unsaved.get(id) === settings) this.unsaved.delete(id);
  }

  /** Apply settings changed by another tab, unless own changes are pending. */
  applyRemote(before: WireConversation | undefined, now: WireConversation): void {
    if (this.pending || this.unsaved.has(now.id) || !before || before.rev > now.rev) return;
    if (JSON.stringify(readSettings(before.metadata)) !== JSON.stringify(readSettings(now.metadata))) this.apply(now);
  }
}

/** Settings of the shown conversation. Sampling is not stored while it equals the built-in defaults. */
export function currentSettings(): ConversationSettings {
  const plain = sameSampling(sampling.value, DEFAULT_SAMPLING) && sameSampling(defaultSampling.value, DEFAULT_SAMPLING);
  return { system: systemPrompt.value, sampling: plain ? null : sampling.value };
}
