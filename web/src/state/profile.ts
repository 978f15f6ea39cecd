// Keeps how the shown conversation is answered (system prompt, sampling) in its metadata, a moment after a change.
import { batch } from "@preact/signals";
import type { WireConversation } from "../wire/frames";
import type { Conversations } from "./conversations";
import { type Profile, readProfile, withProfile } from "./metadata";
import {
  DEFAULT_SAMPLING, defaultSampling, sameSampling, sampling, startFromDefaults, systemPrompt,
} from "./settings";

const WAIT_MS = 400; // a slider changes often

interface Waiting {
  readonly id: string;
  readonly profile: Profile;
  readonly timer: ReturnType<typeof setTimeout>;
}

export class ProfileKeeper {
  private waiting: Waiting | null = null;
  private writing: Promise<void> | null = null;
  private known = ""; // what is shown and need not be written

  constructor(private readonly conversations: Conversations) {
    addEventListener("pagehide", () => void this.flush());
  }

  /** Answer as the conversation remembers it. */
  show(head: WireConversation | undefined): void {
    const { system, sampling: stored } = readProfile(head?.metadata);
    this.known = "showing";
    batch(() => {
      systemPrompt.value = system;
      sampling.value = stored ?? defaultSampling.value;
    });
    this.known = JSON.stringify(present());
  }

  /** Answer as any new conversation. */
  showDefaults(): void {
    void this.flush();
    startFromDefaults();
  }

  /** A conversation began with the present settings: remember them. */
  begin(id: string): void {
    this.known = JSON.stringify({ system: "", sampling: null });
    this.changed(id);
    void this.flush();
  }

  /** The settings may have changed: remember them with the conversation. */
  changed(id: string | null): void {
    if (this.known === "showing") return;
    if (this.waiting && this.waiting.id !== id) void this.flush();
    if (this.waiting) clearTimeout(this.waiting.timer);
    this.waiting = null;
    const profile = present();
    if (id === null || JSON.stringify(profile) === this.known) return;
    this.waiting = { id, profile, timer: setTimeout(() => void this.flush(), WAIT_MS) };
  }

  /** Write what waits to be written, and wait until all is. */
  async flush(): Promise<void> {
    const waiting = this.waiting;
    if (!waiting) return (await this.writing) ?? undefined;
    clearTimeout(waiting.timer);
    this.waiting = null;
    this.known = JSON.stringify(waiting.profile);
    const writing = this.conversations.changeMetadata(waiting.id, (metadata) => withProfile(metadata, waiting.profile));
    this.writing = writing;
    await writing;
    if (this.writing === writing) this.writing = null;
  }

  /** Another tab may have changed the settings of the shown conversation: take them, unless ours are on their way. */
  take(before: WireConversation | undefined, now: WireConversation): void {
    if (this.waiting || this.writing || !before || before.rev > now.rev) return;
    if (JSON.stringify(readProfile(before.metadata)) !== JSON.stringify(readProfile(now.metadata))) this.show(now);
  }
}

/** How the shown conversation is answered. What is as it is for everybody needs no memory. */
function present(): Profile {
  const plain = sameSampling(sampling.value, DEFAULT_SAMPLING) && sameSampling(defaultSampling.value, DEFAULT_SAMPLING);
  return { system: systemPrompt.value, sampling: plain ? null : sampling.value };
}
