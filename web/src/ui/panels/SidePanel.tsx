// The panel at the right with its tabs: candidates, beams, branches, KV pages.

import { useRef } from "preact/hooks";
import { Close } from "../icons";
import { focusComposer, PANEL_LABELS, panel, SIDE_PANELS, sidePanel } from "../navigation";
import { BeamsPanel } from "./BeamsPanel";
import { BranchesPanel } from "./BranchesPanel";
import { CandidatesPanel } from "./CandidatesPanel";
import { KvPagesPanel } from "./KvPagesPanel";
import "./side-panels.css";

const CONTENTS = { candidates: CandidatesPanel, beams: BeamsPanel, branches: BranchesPanel, pages: KvPagesPanel };

export function SidePanel() {
  const tabs = useRef<HTMLDivElement>(null);
  const shown = sidePanel.value;
  if (shown === null) return null;
  const Content = CONTENTS[shown];
  const onKeyDown = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step === 0 || event.altKey) return;
    event.preventDefault();
    const next = SIDE_PANELS[(SIDE_PANELS.indexOf(shown) + step + SIDE_PANELS.length) % SIDE_PANELS.length]!;
    panel.value = next;
    tabs.current?.querySelector<HTMLElement>(`#tab-${next}`)?.focus();
  };
  return (
    <aside class="panel side-panel" aria-label="Panel">
      <header class="side-panel-head">
        <div class="tabs" role="tablist" aria-label="Panel" ref={tabs} onKeyDown={onKeyDown}>
          {SIDE_PANELS.map((name) => (
            <button
              key={name}
              type="button"
              role="tab"
              id={`tab-${name}`}
              aria-selected={name === shown}
              aria-controls="side-content"
              tabIndex={name === shown ? 0 : -1}
              onClick={() => (panel.value = name)}
            >
              {PANEL_LABELS[name]}
            </button>
          ))}
        </div>
        <button
          type="button"
          class="tool"
          aria-label="Close the panel"
          title="Close (Ctrl+.)"
          onClick={() => {
            panel.value = null;
            focusComposer();
          }}
        >
          <Close />
        </button>
      </header>
      <div class="side-content" role="tabpanel" id="side-content" aria-labelledby={`tab-${shown}`} tabIndex={0}>
        <Content />
      </div>
    </aside>
  );
}
