// Form for the values of the variables of a saved prompt.

import { useRef } from "preact/hooks";
import { fillVariables, type SavedPrompt } from "../../server/savedPrompts";
import { Modal } from "../Modal";

interface FormProps {
  readonly prompt: SavedPrompt;
  readonly onFilled: (text: string) => void;
  readonly onClosed: () => void;
}

export function VariablesForm({ prompt, onFilled, onClosed }: FormProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const fill = (form: HTMLFormElement) => {
    const values = [...form.querySelectorAll("textarea")].map((field) => [field.name, field.value] as const);
    dialog.current?.close(); // the focus returns before the message box takes it
    onFilled(fillVariables(prompt.text, new Map(values)));
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Escape") event.stopPropagation(); // the dialog closes; a running answer goes on
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    const form = (event.target as HTMLElement).closest("form");
    if (!form || !(event.target instanceof HTMLTextAreaElement)) return;
    event.preventDefault();
    form.requestSubmit(); // moves to the next field without a value
  };
  return (
    <Modal dialog={dialog} label={`Values for ${prompt.name}`} onClosed={onClosed} onKeyDown={onKeyDown}>
      <form
        class="field"
        onSubmit={(event) => {
          event.preventDefault();
          fill(event.currentTarget);
        }}
      >
        <h2 class="field-label">/{prompt.name}</h2>
        {prompt.variables.map((name, index) => (
          <label key={name} class="field">
            <span class="field-label">{name}</span>
            <textarea name={name} rows={2} dir="auto" required autofocus={index === 0} />
          </label>
        ))}
        <div class="prompt-tools">
          <button type="submit" class="button button-main">
            Insert
          </button>
          <button type="button" class="button" onClick={() => dialog.current?.close()}>
            Cancel
          </button>
        </div>
      </form>
    </Modal>
  );
}
