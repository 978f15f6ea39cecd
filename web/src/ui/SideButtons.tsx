// The four doors to the side panel, in the top bar. On a phone one opens what was shown last.
import { useChat } from "./context";
import { Beams, Cells, Columns, Fork, PanelRight } from "./icons";
import { type SidePanelName, lastSidePanel, panel, togglePanel } from "./panels";

const PANEL_BUTTONS: readonly { name: SidePanelName; label: string; icon: typeof Fork }[] = [
  { name: "candidates", label: "Candidates", icon: Columns },
  { name: "beams", label: "Beams", icon: Beams },
  { name: "branches", label: "Branches", icon: Fork },
  { name: "pages", label: "Pages", icon: Cells },
];

export function PanelButtons() {
  const searching = useChat().live.value?.beamTree.value ?? null;
  return (
    <>
      <div class="doors" role="group" aria-label="Panels">
        {PANEL_BUTTONS.map(({ name, label, icon: Icon }, index) => (
          <button
            key={name}
            type="button"
            class="tool"
            aria-label={label}
            title={`${label} (Alt+Shift+${index + 1})`}
            aria-pressed={panel.value === name}
            data-busy={name === "beams" && searching !== null ? true : undefined}
            onClick={() => togglePanel(name)}
          >
            <Icon />
          </button>
        ))}
      </div>
      <button type="button" class="tool door" aria-label="Panel" onClick={() => togglePanel(lastSidePanel.value)}>
        <PanelRight />
      </button>
    </>
  );
}
