// Where in the tree a request continues, and what it adds there.
import type { Continuation, CreateFrame } from "../api/frames";
import type { Sampling } from "../app/settings";
import type { Thread } from "./thread";
import type { Message } from "./tree";
import type { ForkStart } from "./turn";

export function continuationOf(thread: Thread, user: Message): Continuation {
  const stored = user.id.value;
  if (stored !== null) return { input: [], previous_item_id: stored };
  return { input: [{ role: "user", content: user.text.value }], ...continuationAfter(thread, user.parent) };
}

/** Inside an answer: another one beside it, with the same beginning. */
export function continuationAtToken(start: ForkStart): Continuation {
  const place = { input: [], previous_item_id: start.item, fork_at: start.keepTokens };
  return start.token ? { ...place, fork_with: start.token.id } : place;
}

/** Where something goes that is said after the message `parent`; null is the root. */
export function continuationAfter(thread: Thread, parent: string | null): Omit<Continuation, "input"> {
  const conversation = thread.id.value;
  const after = nearestStored(thread, parent);
  if (after !== null) return { previous_item_id: after };
  return conversation === null ? {} : { conversation, previous_item_id: "root" };
}

/** The nearest message from `key` upwards that the server knows; null at a root. */
function nearestStored(thread: Thread, key: string | null): string | null {
  while (key !== null) {
    const above = thread.tree.value.get(key);
    if (above?.id.value) return above.id.value;
    key = above?.parent ?? null;
  }
  return null;
}

// ---- Sampling settings as the wire spells them.

type Fields = Pick<
  CreateFrame,
  "n" | "beam_width" | "stream_beams" | "temperature" | "top_p" | "max_output_tokens" | "seed"
>;

export function requestFields(settings: Sampling): Fields {
  const common: Fields = {
    ...(settings.n > 1 ? { n: settings.n } : {}),
    ...(settings.maxTokens > 0 ? { max_output_tokens: settings.maxTokens } : {}),
  };
  if (settings.search === "beam") return { ...common, beam_width: Math.max(2, settings.n), stream_beams: true };
  return {
    ...common,
    temperature: settings.temperature,
    top_p: settings.topP,
    ...(settings.seed !== null ? { seed: settings.seed } : {}),
  };
}
