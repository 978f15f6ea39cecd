// The dialog that lists the keyboard shortcuts.

import { useRef } from "preact/hooks";
import { COMMANDS } from "./commands";
import { Close } from "./icons";
import { Modal } from "./Modal";
import { closeDialog } from "./navigation";

export function Shortcuts() {
  const dialog = useRef<HTMLDialogElement>(null);
  return (
    <Modal dialog={dialog} label="Keyboard shortcuts" onClosed={() => closeDialog("shortcuts")}>
      <header class="panel-head">
        <h2>Keyboard</h2>
        <button type="button" class="tool" aria-label="Close shortcuts" onClick={() => dialog.current?.close()}>
          <Close />
        </button>
      </header>
      <dl class="keys">
        {COMMANDS.map(({ keys, label }) =>
          keys === undefined ? null : (
            <div key={label}>
              <dt>
                <Keys keys={keys} />
              </dt>
              <dd>{label}</dd>
            </div>
          ),
        )}
      </dl>
      <p class="hint">In a text that is being written, Alt with a key belongs to the text.</p>
    </Modal>
  );
}

/** Keys that are pressed together, such as Ctrl+K. */
export function Keys({ keys }: { keys: string }) {
  return (
    <>
      {keys.split("+").map((key) => (
        <kbd key={key}>{key}</kbd>
      ))}
    </>
  );
}
