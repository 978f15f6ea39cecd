// Draft-ahead prefill: while the reader types, the server is asked to read what is there already, when it has nothing
// better to do. One draft at a time, so that every answer is of the draft that was asked about; nothing is stored.

import { computed, effect, type ReadonlySignal, signal } from "@preact/signals";
import type { ClientFrame, Continuation, ServerFrame } from "../api/frames";
import { prefillWhileTyping, systemPrompt } from "../app/settings";

const DEBOUNCE_MS = 350; // of typing, before the draft is sent
const BUSY_RETRY_MS = 2000; // the server is answering somebody
const MAX_CHARS = 100_000;

type Prewarmed = Extract<ServerFrame, { type: "prompt.prewarmed" }>;

interface Draft {
  readonly text: string;
  readonly target: string; // where it would be said, and under which instructions
}

export interface PrefillProgress {
  readonly inputTokens: number;
  readonly warmTokens: number;
}

export class PrefillAhead {
  readonly text = signal(""); // as it stands in the message box
  private readonly last = signal<(Draft & PrefillProgress) | null>(null);
  private readonly pending = signal<Draft | null>(null);
  private readonly key: ReadonlySignal<string | null>;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private pauseMs = DEBOUNCE_MS;

  /** What the server has read of the draft as it stands; null if nothing. */
  readonly progress = computed<PrefillProgress | null>(() => {
    const last = this.last.value;
    const fits = last !== null && last.target === this.key.value && this.text.value.trimStart().startsWith(last.text);
    return fits && prefillWhileTyping.value && last.warmTokens > 0 ? last : null;
  });

  /** `place` is where the draft would be said, or null while nothing can be. */
  constructor(
    private readonly target: () => Omit<Continuation, "input"> | null,
    private readonly send: (frame: ClientFrame) => boolean,
  ) {
    this.key = computed(() => {
      const where = this.target();
      return where === null ? null : JSON.stringify([where, systemPrompt.value]);
    });
    effect(() => {
      const text = this.text.value.trim();
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

  /** An error that no lane claims: true if a draft was refused. Who sends it is told why. */
  handleError(): boolean {
    const draft = this.pending.peek();
    if (!draft) return false;
    this.last.value = { ...draft, inputTokens: 0, warmTokens: 0 }; // not again as it stands
    this.pending.value = null;
    return true;
  }

  /** The connection is another one: no answer will come. */
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
