// Screen reader announcements and toasts. The thread is not a live region, so that streamed tokens are not read out.
import { signal } from "@preact/signals";

export const announcement = signal("");

export function announce(text: string): void {
  announcement.value = text;
}

// -- Toasts: short messages at the bottom of the page with at most one action

interface ToastAction {
  readonly label: string;
  readonly run: () => void;
  readonly expired?: () => void; // the toast has gone, and the action with it
}

interface Toast {
  readonly id: number;
  readonly text: string;
  readonly action: ToastAction | null;
}

const TOAST_MS = 6000;
/** For a part of the program that the browser could not load. */
export const NOT_LOADED = "This part of the page did not load. Reload the page.";
export const UNDO_MS = 10_000; // of a toast with an action
const HELD_MS = 1000; // until the next look at toasts that are held
const HELD = ".toasts:focus-within"; // not :hover, which stays after a tap
let count = 0;

export const toasts = signal<readonly Toast[]>([]);

/** Show a toast; returns its id. */
export function toast(text: string, action: ToastAction | null = null): number {
  const id = ++count;
  toasts.value = [...toasts.value, { id, text, action }];
  const expire = () => {
    if (document.querySelector(HELD)) setTimeout(expire, HELD_MS);
    else dismiss(id);
  };
  setTimeout(expire, action ? UNDO_MS : TOAST_MS);
  return id;
}

/** The action of the last toast that offers to undo something. */
export function pendingUndo(): (() => void) | null {
  const last = toasts.value.findLast(({ action }) => action?.label === "Undo");
  return last ? () => runAction(last) : null;
}

/** Run the action of a toast, which closes it. */
export function runAction(chosen: Toast): void {
  toasts.value = toasts.value.filter((other) => other !== chosen);
  chosen.action?.run();
}

export function dismiss(id: number): void {
  const gone = toasts.value.find((other) => other.id === id);
  toasts.value = toasts.value.filter((other) => other !== gone);
  gone?.action?.expired?.();
}
