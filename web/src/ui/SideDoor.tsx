// Loads the side panel when it is first opened: nobody waits for drawings that they do not look at.
import { signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { toast } from "../state/toast";
import { panel, sidePanel } from "./panels";

const loaded = signal<ComponentType | null>(null);
let loading = false;

export function SideDoor() {
  if (sidePanel.value === null) return null;
  const Panel = loaded.value;
  if (Panel) return <Panel />;
  void load();
  return <aside class="panel side-panel" aria-label="Panel" aria-busy="true" />;
}

async function load(): Promise<void> {
  if (loading) return;
  loading = true;
  try {
    loaded.value = (await import("./side/SidePanel")).SidePanel;
  } catch {
    panel.value = null;
    toast("The panel did not load. Reload the page.");
  }
  loading = false;
}
