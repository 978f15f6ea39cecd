// Where in the tree a request continues, and what it adds there.
import type { CreateFrame } from "../wire/frames";
import type { Thread } from "./thread";
import type { Message } from "./tree";

export function placeOf(thread: Thread, user: Message): Pick<CreateFrame, "input" | "conversation" | "previous_item_id"> {
  const stored = user.id.value;
  if (stored !== null) return { input: [], previous_item_id: stored };
  const input = [{ role: "user" as const, content: user.text.value }];
  const conversation = thread.id.value;
  const after = storedAncestor(thread, user);
  if (after !== null) return { input, previous_item_id: after };
  if (conversation !== null) return { input, conversation, previous_item_id: "root" };
  return { input };
}

/** The nearest message above `message` that the server knows; null at a root. */
function storedAncestor(thread: Thread, message: Message): string | null {
  for (let key = message.parent; key !== null; ) {
    const above = thread.tree.value.get(key);
    if (above?.id.value) return above.id.value;
    key = above?.parent ?? null;
  }
  return null;
}
