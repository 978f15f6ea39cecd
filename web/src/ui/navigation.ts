// Which panel is open. One at a time; on a phone they lie over the thread.

import { computed, effect, signal } from "@preact/signals";
import { load, save } from "../app/browser";
import type { Chat } from "../chat/chat";
import type { Message } from "../chat/tree";

export const SIDE_PANELS = ["candidates", "beams", "branches", "pages"] as const;
export type SidePanelName = (typeof SIDE_PANELS)[number];
export type PanelName = SidePanelName | "settings" | "shortcuts" | null;

const STORAGE_KEY = "side";

export const sidebarOpen = signal(!matchMedia("(max-width: 800px)").matches);
const restored = restorePanel();
export const panel = signal<PanelName>(restored.open && !isNarrow() ? restored.side : null);

/** The side that was shown last: what opens when nothing says which. */
export const lastSidePanel = signal<SidePanelName>(restored.side);

export const sidePanel = computed<SidePanelName | null>(() => SIDE_PANELS.find((name) => name === panel.value) ?? null);

export function togglePanel(name: Exclude<PanelName, null>, open = panel.value !== name): void {
  panel.value = open ? name : null;
}

export function toggleSidePanel(): void {
  panel.value = sidePanel.value === null ? lastSidePanel.value : null;
}

/** Remember the side panel across reloads. Call once. */
export function persistPanel(): void {
  effect(() => {
    if (sidePanel.value !== null) lastSidePanel.value = sidePanel.value;
    save(STORAGE_KEY, { side: lastSidePanel.value, open: sidePanel.value !== null });
  });
}

export function isNarrow(): boolean {
  return matchMedia("(max-width: 800px)").matches;
}

function restorePanel(): { side: SidePanelName; open: boolean } {
  const found = load<{ side?: SidePanelName; open?: boolean } | null>(STORAGE_KEY, null);
  if (!found?.side || !SIDE_PANELS.includes(found.side)) return { side: "branches", open: false };
  return { side: found.side, open: found.open === true };
}

/** On a phone the list lies over the thread: what was chosen there is what to see now. */
export function closeSidebarIfNarrow(): void {
  if (isNarrow()) sidebarOpen.value = false;
}

// ---- A place in the thread that somebody wants to see: a search hit, a node of the branch map, an address.

/** A message's key or the server's id for it; null: nobody asks. */
export const requestedMessage = signal<string | null>(null);

/**
 * Bring a message into view, whether it is in the document or not, and mark it for a moment. If it is on another branch,
 * that branch is shown; if its conversation still loads, it is shown when it has.
 */
export function scrollToMessage(key: string): void {
  requestedMessage.value = key;
}

// ---- Going to a message: its branch becomes the shown one, and the thread scrolls to it.

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

export function focusComposer(): void {
  document.getElementById("composer")?.focus();
}
