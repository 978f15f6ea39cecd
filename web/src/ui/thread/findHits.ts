// Hits of a text in messages.
import type { Message } from "../../chat/tree";

export interface Hit {
  readonly message: Message;
  readonly offset: number; // in its text, as it was written
}

/** Find every occurrence of `words` in the texts of messages, in their order; case is ignored. */
export function findHits(messages: readonly Message[], words: string): readonly Hit[] {
  const wanted = words.trim().toLowerCase();
  if (wanted === "") return [];
  const hits: Hit[] = [];
  for (const message of messages) {
    const text = message.text.peek().toLowerCase();
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      hits.push({ message, offset: at });
    }
  }
  return hits;
}
