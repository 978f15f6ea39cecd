// Which panel is open. One at a time; on a phone they lie over the thread.
import { computed, effect, signal } from "@preact/signals";

export const SIDES = ["candidates", "beams", "branches", "pages"] as const;
export type Side = (typeof SIDES)[number];
export type Panel = Side | "settings" | "shortcuts" | null;

const KEPT = "chatcache.side";

export const sidebarOpen = signal(!matchMedia("(max-width: 800px)").matches);
const kept = restore();
export const panel = signal<Panel>(kept.open && !isNarrow() ? kept.side : null);

/** The side that was shown last: what opens when nothing says which. */
export const lastSide = signal<Side>(kept.side);

export const side = computed<Side | null>(() => SIDES.find((name) => name === panel.value) ?? null);

export function togglePanel(name: Exclude<Panel, null>, open = panel.value !== name): void {
  panel.value = open ? name : null;
}

export function toggleSide(): void {
  panel.value = side.value === null ? lastSide.value : null;
}

/** Remember the side panel across reloads. Call once. */
export function keepPanel(): void {
  effect(() => {
    if (side.value !== null) lastSide.value = side.value;
    try {
      localStorage.setItem(KEPT, JSON.stringify({ side: lastSide.value, open: side.value !== null }));
    } catch {
      // storage is off: the choice lasts as long as the tab
    }
  });
}

export function isNarrow(): boolean {
  return matchMedia("(max-width: 800px)").matches;
}

function restore(): { side: Side; open: boolean } {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) ?? "{}") as { side?: Side; open?: boolean };
    if (found.side && SIDES.includes(found.side)) return { side: found.side, open: found.open === true };
  } catch {
    // storage is off, or was written by something else
  }
  return { side: "branches", open: false };
}

/** On a phone the list lies over the thread: what was chosen there is what to see now. */
export function leaveList(): void {
  if (isNarrow()) sidebarOpen.value = false;
}
