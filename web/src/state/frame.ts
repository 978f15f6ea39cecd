// Deltas arrive faster than the screen draws. Gather them and hand them over once per frame.
import { type Signal, batch } from "@preact/signals";
import type { Message } from "./tree";

const HIDDEN_TAB_MS = 250; // a hidden tab gets no animation frames

export class DeltaBatcher {
  private readonly pending = new Map<Signal<string>, string>();
  private scheduled = false;

  append(message: Message, delta: string): void {
    this.appendTo(message.text, delta);
  }

  appendTo(text: Signal<string>, delta: string): void {
    this.pending.set(text, (this.pending.get(text) ?? "") + delta);
    if (this.scheduled) return;
    this.scheduled = true;
    if (document.hidden) setTimeout(() => this.flush(), HIDDEN_TAB_MS);
    else requestAnimationFrame(() => this.flush());
  }

  flush(): void {
    this.scheduled = false;
    batch(() => {
      for (const [text, delta] of this.pending) text.value += delta;
      this.pending.clear();
    });
  }
}
