// The one line that a screen reader hears. The thread itself is no live region: nobody wants every token read out.
import { signal } from "@preact/signals";

export const announcement = signal("");

export function announce(text: string): void {
  announcement.value = text;
}
