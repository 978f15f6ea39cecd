// Which panel is open. One at a time; on a phone they lie over the thread.
import { computed, effect, signal } from "@preact/signals";

export const SIDE_PANELS = ["candidates", "beams", "branches", "pages"] as const;
export type SidePanelName = (typeof SIDE_PANELS)[number];
export type PanelName = SidePanelName | "settings" | "shortcuts" | null;

const STORAGE_KEY = "chatcache.side";

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
    try {
      localStorage.setItem(STORAGE_KEY, JSON.stringify({ side: lastSidePanel.value, open: sidePanel.value !== null }));
    } catch {
      // storage is off: the choice lasts as long as the tab
    }
  });
}

export function isNarrow(): boolean {
  return matchMedia("(max-width: 800px)").matches;
}

function restorePanel(): { side: SidePanelName; open: boolean } {
  try {
    const found = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "{}") as { side?: SidePanelName; open?: boolean };
    if (found.side && SIDE_PANELS.includes(found.side)) return { side: found.side, open: found.open === true };
  } catch {
    // storage is off, or was written by something else
  }
  return { side: "branches", open: false };
}

/** On a phone the list lies over the thread: what was chosen there is what to see now. */
export function closeSidebarIfNarrow(): void {
  if (isNarrow()) sidebarOpen.value = false;
}
