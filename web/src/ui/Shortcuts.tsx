// The list behind Ctrl+/. It is the same table that keys.ts acts on.
import { useEffect, useRef } from "preact/hooks";
import { SHORTCUTS } from "./keys";
import { Close } from "./icons";
import { panel } from "./panels";

export function Shortcuts() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  const close = () => (panel.value = null);
  return (
    <dialog class="dialog" ref={dialog} aria-label="Keyboard shortcuts" onClose={close}>
      <header class="panel-head">
        <h2>Keyboard</h2>
        <button type="button" class="tool" aria-label="Close shortcuts" onClick={() => dialog.current?.close()}><Close /></button>
      </header>
      <dl class="keys">
        {SHORTCUTS.map((shortcut) => (
          <div key={shortcut.keys}>
            <dt>{shortcut.keys.split("+").map((key) => <kbd key={key}>{key}</kbd>)}</dt>
            <dd>{shortcut.description}</dd>
          </div>
        ))}
      </dl>
    </dialog>
  );
}
