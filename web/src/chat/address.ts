// Keeps the address (#conv_x, #conv_x/msg_y) in step with the shown conversation, so that reload, bookmarks and the
// back button work. The second part is the message to scroll to.

import { effect } from "@preact/signals";
import type { Chat } from "./chat";

interface AddressHandlers {
  /** A conversation is about to be loaded. */
  readonly onOpen: () => void;
  /** The address names a message of the conversation. */
  readonly onMessage: (id: string) => void;
}

/** Keep the address and the chat in step. Call once. */
export function syncAddress(chat: Chat, addressed: AddressHandlers): void {
  const follow = () => {
    const [id, message] = read();
    if (message) addressed.onMessage(message);
    if (id === chat.thread.value.id.value) return;
    if (id === null) return chat.newConversation();
    addressed.onOpen();
    void chat.open(id);
  };
  follow();
  addEventListener("popstate", follow);
  addEventListener("hashchange", follow);
  let shown = chat.thread.peek();
  effect(() => {
    const thread = chat.thread.value;
    const id = thread.id.value;
    const another = thread !== shown;
    shown = thread;
    if (id === addressedConversation()) return;
    // Switching conversations adds a history entry, or takes that of an open panel; a new conversation that gets its id
    // keeps its entry.
    const hasState = history.state !== null;
    history[another && !hasState ? "pushState" : "replaceState"](another ? null : history.state, "", addressOf(id));
  });
}

/** The address of a conversation; of null: a new one. */
export function addressOf(id: string | null): string {
  return id === null ? location.pathname + location.search : `#${encodeURIComponent(id)}`;
}

/** The conversation that the address names. */
export function addressedConversation(): string | null {
  return read()[0];
}

function read(): [conversation: string | null, message: string | null] {
  try {
    const [id, message] = decodeURIComponent(location.hash.slice(1)).split("/");
    return [id || null, message || null];
  } catch {
    return [null, null]; // not an address of this page
  }
}
