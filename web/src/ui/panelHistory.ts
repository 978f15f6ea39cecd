// On a narrow screen a panel or the list covers the conversation, and the browser's back button closes it: while one is
// open, the history has an entry of its own for it, with the address of the conversation below.

import { batch, computed, effect } from "@preact/signals";
import { addressedConversation, addressOf } from "../chat/address";
import type { Chat } from "../chat/chat";
import { DIALOGS, type DialogName, dialog, isNarrow, type PanelName, panel, sidebarOpen } from "./navigation";

type Cover = DialogName | PanelName | "sidebar";

const cover = computed<Cover | null>(() => dialog.value ?? panel.value ?? (sidebarOpen.value ? "sidebar" : null));

/** What covers the conversation at a history entry. */
function coverOf(state: unknown): Cover | null {
  return (state as { cover?: Cover } | null)?.cover ?? null;
}

function show(shown: Cover | null): void {
  const dialogShown = DIALOGS.find((name) => name === shown) ?? null;
  batch(() => {
    sidebarOpen.value = shown === "sidebar";
    dialog.value = dialogShown;
    panel.value = shown === "sidebar" || shown === dialogShown ? null : (shown as PanelName | null);
  });
}

/** Keep the history and what covers the conversation in step. Call once, before `syncAddress`. */
export function trackPanelHistory(chat: Chat): void {
  let isLeaving = false; // the entry of something that was closed on the page

  const sync = () => {
    const [shown, entry] = [cover.peek(), coverOf(history.state)];
    if (!isNarrow() || isLeaving || shown === entry) return;
    if (shown !== null) history[entry === null ? "pushState" : "replaceState"]({ cover: shown }, "", location.href);
    else {
      isLeaving = true;
      history.back();
    }
  };

  const onPopState = (event: PopStateEvent) => {
    const [shown, entry] = [cover.peek(), coverOf(event.state)];
    const wasLeaving = isLeaving;
    isLeaving = false;
    if (!isNarrow() || (!wasLeaving && shown === entry)) return;
    const id = chat.thread.peek().id.peek();
    // the conversation got its id while it was covered
    if (entry === null && addressedConversation() === null && id !== null)
      history.replaceState(null, "", addressOf(id));
    if (addressedConversation() === id) event.stopImmediatePropagation(); // the conversation stays as it is
    if (wasLeaving) sync();
    else show(entry);
  };

  if (isNarrow()) show(coverOf(history.state)); // after a reload
  addEventListener("popstate", onPopState);
  effect(() => {
    void [cover.value, chat.thread.value];
    queueMicrotask(sync); // after the event, which may open a conversation and close the list
  });
}
