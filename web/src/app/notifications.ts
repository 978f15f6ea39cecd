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
}

interface Toast {
  readonly id: number;
  readonly text: string;
  readonly action: ToastAction | null;
}

const TOAST_MS = 6000;
export const UNDO_MS = TOAST_MS; // an action can be undone while its toast is shown
let count = 0;

export const toasts = signal<readonly Toast[]>([]);

/** Show a toast; returns its id. */
export function toast(text: string, action: ToastAction | null = null): number {
  const id = ++count;
  toasts.value = [...toasts.value, { id, text, action }];
  setTimeout(() => dismiss(id), TOAST_MS);
  return id;
}

/** The action of the last toast that offers to undo something. */
export function pendingUndo(): (() => void) | null {
  const last = toasts.value.findLast(({ action }) => action?.label === "Undo");
  if (!last) return null;
  return () => {
    last.action?.run();
    dismiss(last.id);
  };
}

export function dismiss(id: number): void {
  toasts.value = toasts.value.filter((other) => other.id !== id);
}
