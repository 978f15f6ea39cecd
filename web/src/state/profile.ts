// Keeps how the shown conversation is answered (system prompt, sampling) in its metadata, a moment after a change.
import { batch } from "@preact/signals";
import type { WireConversation } from "../wire/frames";
import type { Conversations } from "./conversations";
import { type ConversationSettings, readSettings, withSettings } from "./metadata";
import {
  DEFAULT_SAMPLING, defaultSampling, sameSampling, sampling, startFromDefaults, systemPrompt,
} from "./settings";

const SAVE_DELAY_MS = 400; // a slider changes often

interface PendingSave {
  readonly id: string;
  readonly profile: ConversationSettings;
  readonly timer: ReturnType<typeof setTimeout>;
}

export class SettingsSync {
  private pending: PendingSave | null = null;
  private writing: Promise<void> | null = null;
  private savedState = ""; // what is shown and need not be written

  constructor(private readonly conversations: Conversations) {
    addEventListener("pagehide", () => void this.flush());
  }

  /** Answer as the conversation remembers it. */
  apply(head: WireConversation | undefined): void {
    const { system, sampling: stored } = readSettings(head?.metadata);
    this.savedState = "showing";
    batch(() => {
      systemPrompt.value = system;
      sampling.value = stored ?? defaultSampling.value;
    });
    this.savedState = JSON.stringify(currentSettings());
  }

  /** Answer as any new conversation. */
  applyDefaults(): void {
    void this.flush();
    startFromDefaults();
  }

  /** A conversation began with the present settings: remember them. */
  attach(id: string): void {
    this.savedState = JSON.stringify({ system: "", sampling: null });
    this.scheduleSave(id);
    void this.flush();
  }

  /** The settings may have changed: remember them with the conversation. */
  scheduleSave(id: string | null): void {
    if (this.savedState === "showing") return;
    if (this.pending && this.pending.id !== id) void this.flush();
    if (this.pending) clearTimeout(this.pending.timer);
    this.pending = null;
    const profile = currentSettings();
    if (id === null || JSON.stringify(profile) === this.savedState) return;
    this.pending = { id, profile, timer: setTimeout(() => void this.flush(), SAVE_DELAY_MS) };
  }

  /** Write what waits to be written, and wait until all is. */
  async flush(): Promise<void> {
    const waiting = this.pending;
    if (!waiting) return (await this.writing) ?? undefined;
    clearTimeout(waiting.timer);
    this.pending = null;
    this.savedState = JSON.stringify(waiting.profile);
    const writing = this.conversations.changeMetadata(waiting.id, (metadata) => withSettings(metadata, waiting.profile));
    this.writing = writing;
    await writing;
    if (this.writing === writing) this.writing = null;
  }

  /** Another tab may have changed the settings of the shown conversation: take them, unless ours are on their way. */
  applyRemote(before: WireConversation | undefined, now: WireConversation): void {
    if (this.pending || this.writing || !before || before.rev > now.rev) return;
    if (JSON.stringify(readSettings(before.metadata)) !== JSON.stringify(readSettings(now.metadata))) this.apply(now);
  }
}

/** How the shown conversation is answered. What is as it is for everybody needs no memory. */
function currentSettings(): ConversationSettings {
  const plain = sameSampling(sampling.value, DEFAULT_SAMPLING) && sameSampling(defaultSampling.value, DEFAULT_SAMPLING);
  return { system: systemPrompt.value, sampling: plain ? null : sampling.value };
}
