// Going to a message: its branch becomes the shown one, and the thread scrolls to it.
import type { Chat } from "../state/chat";
import type { Message } from "../state/tree";
import { scrollToMessage } from "./anchors";
import { isNarrow, panel } from "./panels";

const SAVE_DELAY_MS = 400; // whoever walks with the arrow keys passes many branches; the last one is kept

let saveTimer: ReturnType<typeof setTimeout> | undefined;

export function goToMessage(chat: Chat, message: Message): void {
  const tree = chat.thread.value.tree.value;
  const leaf = tree.leaf.value;
  tree.reveal(message);
  scrollToMessage(message.key);
  if (isNarrow()) panel.value = null; // it lies over the thread
  clearTimeout(saveTimer);
  if (tree.leaf.value !== leaf) saveTimer = setTimeout(() => chat.choose(message), SAVE_DELAY_MS);
}
