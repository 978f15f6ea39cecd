// Draft-ahead prefill: while the reader types, the server is asked to read what is there already, when it has nothing
// better to do. One draft at a time, so that every answer is of the draft that was asked about; nothing is stored.
import { type ReadonlySignal, computed, effect, signal } from "@preact/signals";
import type { ClientFrame, Place, ServerFrame } from "../wire/frames";
import { draftAhead, systemPrompt } from "./settings";

const PAUSE_MS = 350; // of typing, before the draft is sent
const BUSY_MS = 2000; // the server is answering somebody
const MOST_CHARS = 100_000;

type Prewarmed = Extract<ServerFrame, { type: "prompt.prewarmed" }>;

interface Draft {
  readonly text: string;
  readonly place: string; // where it would be said, and under which instructions
}

export interface Warmth {
  readonly inputTokens: number;
  readonly warmTokens: number;
}

export class Drafts {
  readonly text = signal(""); // as it stands in the message box
  private readonly last = signal<(Draft & Warmth) | null>(null);
  private readonly asked = signal<Draft | null>(null);
  private readonly key: ReadonlySignal<string | null>;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private pauseMs = PAUSE_MS;

  /** What the server has read of the draft as it stands; null if nothing. */
  readonly warm = computed<Warmth | null>(() => {
    const last = this.last.value;
    const fits = last !== null && last.place === this.key.value && this.text.value.trimStart().startsWith(last.text);
    return fits && draftAhead.value && last.warmTokens > 0 ? last : null;
  });

  /** `place` is where the draft would be said, or null while nothing can be. */
  constructor(
    private readonly place: () => Omit<Place, "input"> | null,
    private readonly send: (frame: ClientFrame) => boolean,
  ) {
    this.key = computed(() => {
      const where = this.place();
      return where === null ? null : JSON.stringify([where, systemPrompt.value]);
    });
    effect(() => {
      const text = this.text.value.trim();
      const place = this.key.value;
      clearTimeout(this.timer);
      if (!draftAhead.value || place === null || this.asked.value || text === "" || text.length > MOST_CHARS) return;
      const last = this.last.value;
      if (last?.text === text && last.place === place) return;
      this.timer = setTimeout(() => this.ask({ text, place }), this.pauseMs);
    });
  }

  take(frame: Prewarmed): void {
    const draft = this.asked.peek();
    if (draft && frame.status === "done") {
      this.last.value = { ...draft, inputTokens: frame.input_tokens, warmTokens: frame.warm_tokens };
    }
    this.pauseMs = frame.status === "busy" ? BUSY_MS : PAUSE_MS;
    this.asked.value = null;
  }

  /** An error that no lane claims: true if a draft was refused. Who sends it is told why. */
  refused(): boolean {
    const draft = this.asked.peek();
    if (!draft) return false;
    this.last.value = { ...draft, inputTokens: 0, warmTokens: 0 }; // not again as it stands
    this.asked.value = null;
    return true;
  }

  /** The connection is another one: no answer will come. */
  forget(): void {
    this.asked.value = null;
  }

  private ask(draft: Draft): void {
    const where = this.place();
    if (where === null) return;
    const instructions = systemPrompt.peek();
    const input = [{ role: "user" as const, content: draft.text }];
    const frame: ClientFrame = { type: "prompt.prewarm", ...where, input, ...(instructions ? { instructions } : {}) };
    if (this.send(frame)) this.asked.value = draft;
  }
}
