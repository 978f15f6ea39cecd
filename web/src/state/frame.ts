// Deltas arrive faster than the screen draws. Gather them and hand them over once per frame.
import { batch } from "@preact/signals";
import type { Message } from "./tree";

const HIDDEN_MS = 250; // a hidden tab gets no animation frames

export class FrameBatcher {
  private readonly waiting = new Map<Message, string>();
  private scheduled = false;

  append(message: Message, delta: string): void {
    this.waiting.set(message, (this.waiting.get(message) ?? "") + delta);
    if (this.scheduled) return;
    this.scheduled = true;
    if (document.hidden) setTimeout(() => this.flush(), HIDDEN_MS);
    else requestAnimationFrame(() => this.flush());
  }

  flush(): void {
    this.scheduled = false;
    batch(() => {
      for (const [message, delta] of this.waiting) message.text.value += delta;
      this.waiting.clear();
    });
  }
}
