// Going to a message: its branch becomes the shown one, and the thread scrolls to it.
import type { Chat } from "../state/chat";
import type { Message } from "../state/tree";
import { scrollToMessage } from "./anchors";
import { isNarrow, panel } from "./panels";

const SETTLE_MS = 400; // whoever walks with the arrow keys passes many branches; the last one is kept

let settling: ReturnType<typeof setTimeout> | undefined;

export function goTo(chat: Chat, message: Message): void {
  const tree = chat.thread.value.tree.value;
  const leaf = tree.leaf.value;
  tree.reveal(message);
  scrollToMessage(message.key);
  if (isNarrow()) panel.value = null; // it lies over the thread
  clearTimeout(settling);
  if (tree.leaf.value !== leaf) settling = setTimeout(() => chat.choose(message), SETTLE_MS);
}
