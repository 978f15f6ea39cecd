// Navigation state: the open panel (one at a time; over the thread on a phone), the dialog over it, the sidebar, and the
// message to scroll to.

import { computed, effect, signal } from "@preact/signals";
import { load, save } from "../app/browser";
import type { Chat } from "../chat/chat";
import type { Message } from "../chat/tree";

export const SIDE_PANELS = ["candidates", "beams", "branches", "pages"] as const;
export type SidePanelName = (typeof SIDE_PANELS)[number];
export const PANEL_LABELS: Readonly<Record<SidePanelName, string>> = {
  candidates: "Candidates",
  beams: "Beams",
  branches: "Branches",
  pages: "KV pages",
};
export type PanelName = SidePanelName | "settings";
export const DIALOGS = ["shortcuts", "administration", "prompts"] as const;
export type DialogName = (typeof DIALOGS)[number];

const STORAGE_KEY = "side";

export const sidebarOpen = signal(!matchMedia("(max-width: 800px)").matches);
const restored = restorePanel();
export const panel = signal<PanelName | null>(restored.open && !isNarrow() ? restored.side : null);

/** The modal dialog over the page. The panel below stays as it is. */
export const dialog = signal<DialogName | null>(null);

export const findOpen = signal(false); // the search in the conversation is shown
export const paletteOpen = signal(false); // the command palette is shown

/** The side panel that was shown last; shortcuts reopen it. */
export const lastSidePanel = signal<SidePanelName>(restored.side);

export const sidePanel = computed<SidePanelName | null>(() => SIDE_PANELS.find((name) => name === panel.value) ?? null);

export function togglePanel(name: PanelName, open = panel.value !== name): void {
  panel.value = open ? name : null;
}

export function toggleDialog(name: DialogName, open = dialog.value !== name): void {
  dialog.value = open ? name : null;
}

/** Close a dialog that the browser has closed, unless another one was opened meanwhile. */
export function closeDialog(name: DialogName): void {
  if (dialog.value === name) dialog.value = null;
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

/** On a phone the sidebar covers the thread: close it after a selection. */
export function closeSidebarIfNarrow(): void {
  if (isNarrow()) sidebarOpen.value = false;
}

/** Delete a conversation; after Undo its row has the focus. */
export function removeConversation(chat: Chat, id: string): void {
  const isShown = chat.thread.value.id.value === id;
  const focus = () => document.querySelector<HTMLElement>(`[data-id="${id}"] .conversation-open`)?.focus();
  chat.remove(id, () => {
    if (isShown) restoredConversation.value = id;
    setTimeout(focus); // after the row is rendered again
  });
}

// -- Scrolling to a message: a search hit, a node of the branch map, an address

/** Key or server id of the message to scroll to; null: none. */
export const requestedMessage = signal<string | null>(null);

/**
 * Scroll to a message and highlight it briefly, whether it is in the document or not. If it is on another branch, that
 * branch is shown; if its conversation is still loading, it happens afterwards.
 */
export function scrollToMessage(key: string): void {
  requestedMessage.value = key;
}

/** The answer whose form of Compare settings is open; null: none. */
export const comparedAnswer = signal<Message | null>(null);

/** A conversation whose deletion was undone, and which is opened without the focus in the message box; null: none. */
export const restoredConversation = signal<string | null>(null);

/** A message whose deletion was undone, and which takes the focus; null: none. */
export const restoredMessage = signal<Message | null>(null);

// Show the branch of a message and scroll to it.

const SAVE_DELAY_MS = 400; // arrow keys pass many branches; only the last one is stored

let saveTimer: ReturnType<typeof setTimeout> | undefined;

export function goToMessage(chat: Chat, message: Message): void {
  const tree = chat.thread.value.tree.value;
  const leaf = tree.leaf.value;
  tree.reveal(message);
  scrollToMessage(message.key);
  if (isNarrow()) panel.value = null; // it covers the thread
  clearTimeout(saveTimer);
  if (tree.leaf.value !== leaf) saveTimer = setTimeout(() => chat.choose(message), SAVE_DELAY_MS);
}

/** Whether the page is used by touch: the keyboard is on the screen, and its Return key inserts a new line. */
export function isTouch(): boolean {
  return matchMedia("(pointer: coarse)").matches;
}

/**
 * Focus the message box; on a touch screen the messages, as its keyboard would cover the conversation, unless that is
 * `wanted`. Call it when the element with the focus goes.
 */
export function focusComposer(wanted = false): void {
  const isAllowed = wanted || matchMedia("(pointer: fine)").matches || document.activeElement?.id === "composer";
  if (isAllowed) document.getElementById("composer")?.focus();
  // not at the load of the page: without a tap before it, the browser would frame the messages
  else if (navigator.userActivation?.hasBeenActive) document.querySelector<HTMLElement>(".thread-scroll")?.focus();
}
