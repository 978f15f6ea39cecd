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
    if (id === read()[0]) return;
    const url = id === null ? location.pathname + location.search : `#${encodeURIComponent(id)}`;
    // switching conversations adds a history entry; a new conversation that gets its id does not
    history[another ? "pushState" : "replaceState"](null, "", url);
  });
}

function read(): [conversation: string | null, message: string | null] {
  try {
    const [id, message] = decodeURIComponent(location.hash.slice(1)).split("/");
    return [id || null, message || null];
  } catch {
    return [null, null]; // not an address of this page
  }
}
