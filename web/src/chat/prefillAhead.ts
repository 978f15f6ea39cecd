// Prefill while typing: the unsent draft is sent to the server, which prefills it when it is idle. One draft at a time,
// so that each response belongs to the draft that was sent; nothing is stored.

import { computed, effect, type ReadonlySignal, signal } from "@preact/signals";
import type { ClientFrame, Continuation, ServerFrame, ToolFields } from "../api/frames";
import { prefillWhileTyping, systemPrompt } from "../app/settings";
import { joinMessage } from "./attachments";

const DEBOUNCE_MS = 350; // pause in typing before the draft is sent
const BUSY_RETRY_MS = 2000; // the server is busy with other requests
const MAX_CHARS = 100_000;

type Prewarmed = Extract<ServerFrame, { type: "prompt.prewarmed" }>;

interface Draft {
  readonly text: string;
  readonly target: string; // continuation point, tools and instructions of the draft, as JSON
}

interface PrefillProgress {
  readonly inputTokens: number;
  readonly warmTokens: number;
}

export class PrefillAhead {
  readonly text = signal(""); // text of the message box
  private readonly content: ReadonlySignal<string>; // with its files
  private readonly last = signal<(Draft & PrefillProgress) | null>(null);
  private readonly pending = signal<Draft | null>(null);
  private readonly key: ReadonlySignal<string | null>;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private pauseMs = DEBOUNCE_MS;

  /** Prefilled part of the current draft; null if there is none. */
  readonly progress = computed<PrefillProgress | null>(() => {
    const last = this.last.value;
    const fits = last !== null && last.target === this.key.value && this.content.value.startsWith(last.text);
    return fits && prefillWhileTyping.value && last.warmTokens > 0 ? last : null;
  });

  /** `target` returns where the draft would be sent, or null while nothing can be sent. */
  constructor(
    private readonly target: () => (Omit<Continuation, "input"> & ToolFields) | null,
    private readonly send: (frame: ClientFrame) => boolean,
    files: ReadonlySignal<readonly { readonly block: string }[]> = signal([]),
  ) {
    this.content = computed(() => joinMessage(files.value, this.text.value.trimStart()));
    this.key = computed(() => {
      const where = this.target();
      return where === null ? null : JSON.stringify([where, systemPrompt.value]);
    });
    effect(() => {
      const text = this.content.value.trim();
      const target = this.key.value;
      clearTimeout(this.timer);
      if (!prefillWhileTyping.value || target === null || this.pending.value || text === "" || text.length > MAX_CHARS)
        return;
      const last = this.last.value;
      if (last?.text === text && last.target === target) return;
      this.timer = setTimeout(() => this.request({ text, target }), this.pauseMs);
    });
  }

  receive(frame: Prewarmed): void {
    const draft = this.pending.peek();
    if (draft && frame.status === "done") {
      this.last.value = { ...draft, inputTokens: frame.input_tokens, warmTokens: frame.warm_tokens };
    }
    this.pauseMs = frame.status === "busy" ? BUSY_RETRY_MS : DEBOUNCE_MS;
    this.pending.value = null;
  }

  /** Handle an error that belongs to no stream: true if it refused a draft. Sending the message will report it. */
  handleError(): boolean {
    const draft = this.pending.peek();
    if (!draft) return false;
    this.last.value = { ...draft, inputTokens: 0, warmTokens: 0 }; // do not retry this draft
    this.pending.value = null;
    return true;
  }

  /** The connection was replaced: no response will arrive. */
  reset(): void {
    this.pending.value = null;
  }

  private request(draft: Draft): void {
    const where = this.target();
    if (where === null) return;
    const instructions = systemPrompt.peek();
    const input = [{ role: "user" as const, content: draft.text }];
    const frame: ClientFrame = { type: "prompt.prewarm", ...where, input, ...(instructions ? { instructions } : {}) };
    if (this.send(frame)) this.pending.value = draft;
  }
}
