// A place in the thread that somebody wants to see: a search hit, a node of the branch map, an address.
import { signal } from "@preact/signals";

/** A message's key or the server's id for it; null: nobody asks. */
export const requestedMessage = signal<string | null>(null);

/**
 * Bring a message into view, whether it is in the document or not, and mark it for a moment. If it is on another branch,
 * that branch is shown; if its conversation still loads, it is shown when it has.
 */
export function scrollToMessage(key: string): void {
  requestedMessage.value = key;
}
