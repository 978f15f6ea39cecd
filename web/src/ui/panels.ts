// Which panel is open. One at a time; on a phone they lie over the thread.
import { signal } from "@preact/signals";

export type Panel = "settings" | "shortcuts" | null;

export const panel = signal<Panel>(null);
export const sidebarOpen = signal(!matchMedia("(max-width: 800px)").matches);

export function togglePanel(name: Exclude<Panel, null>, open = panel.value !== name): void {
  panel.value = open ? name : null;
}

export function isNarrow(): boolean {
  return matchMedia("(max-width: 800px)").matches;
}
