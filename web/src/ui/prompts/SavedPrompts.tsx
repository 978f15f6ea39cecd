// The saved prompts of the server in a dialog: list, create, edit, and delete with undo.

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import {
  createPrompt,
  deletePrompt,
  listPrompts,
  type PromptFields,
  type SavedPrompt,
  updatePrompt,
} from "../../server/savedPrompts";
import { Close } from "../icons";
import { Modal } from "../Modal";
import { closeDialog } from "../navigation";
import "./saved-prompts.css";

const NAME_RULE = "small letters, digits and -";
const NEW: PromptFields = { name: "", text: "", description: "" };

export function SavedPrompts() {
  const dialog = useRef<HTMLDialogElement>(null);
  const prompts = useSignal<readonly SavedPrompt[] | null>(null);
  const edited = useSignal<PromptFields | null>(null);
  const deleted = useSignal<SavedPrompt | null>(null);
  const problem = useSignal("");
  /** Run a change and read the list again; false if that failed. */
  const apply = async (change: () => Promise<unknown>): Promise<boolean> => {
    problem.value = "";
    try {
      await change();
      prompts.value = await listPrompts();
      return true;
    } catch (error) {
      problem.value = (error as Error).message;
      return false;
    }
  };
  useEffect(() => void apply(() => Promise.resolve()), []);
  const edit = (prompt: PromptFields | null) => {
    problem.value = "";
    deleted.value = null;
    edited.value = prompt;
  };
  const save = async (old: PromptFields, fields: PromptFields) => {
    if (await apply(() => (old === NEW ? createPrompt(fields) : updatePrompt(old.name, fields)))) edit(null);
  };
  const remove = async (prompt: SavedPrompt) => {
    if (await apply(() => deletePrompt(prompt.name))) deleted.value = prompt;
  };
  const restore = async ({ name, text, description }: SavedPrompt) => {
    if (await apply(() => createPrompt({ name, text, description }))) deleted.value = null;
  };
  return (
    <Modal
      class="saved-prompts"
      dialog={dialog}
      label="Saved prompts"
      onClosed={() => closeDialog("prompts")}
      onKeyDown={(event) => event.key === "Escape" && event.stopPropagation()} // a running answer goes on
    >
      <header class="panel-head">
        <h2>Saved prompts</h2>
        <button type="button" class="tool" aria-label="Close saved prompts" onClick={() => dialog.current?.close()}>
          <Close />
        </button>
      </header>
      <p class="hint">
        Texts to start a message with, shared by all users of your tenant: type / and the name. System prompts are
        another list: they tell the assistant how to behave, and those that you save stay in this browser (Settings).
      </p>
      {problem.value !== "" && (
        <p class="ending-error" role="alert">
          {problem.value}
        </p>
      )}
      {edited.value !== null ? (
        <PromptForm key={edited.value.name} prompt={edited.value} onSave={save} onCancel={() => edit(null)} />
      ) : (
        <>
          {prompts.value?.length === 0 && <p class="hint">There is none yet.</p>}
          <ul class="saved-prompt-list">
            {prompts.value?.map((prompt) => (
              <li key={prompt.name}>
                <div class="saved-prompt-text" dir="auto">
                  <b>/{prompt.name}</b> {prompt.description}
                  <p class="hint">{prompt.text}</p>
                </div>
                <button type="button" class="link" onClick={() => edit(prompt)}>
                  Edit<span class="sr-only"> {prompt.name}</span>
                </button>
                <button type="button" class="link link-danger" onClick={() => void remove(prompt)}>
                  Delete<span class="sr-only"> {prompt.name}</span>
                </button>
              </li>
            ))}
          </ul>
          <p class="hint" role="status">
            {deleted.value && (
              <>
                “{deleted.value.name}” was deleted for all users.{" "}
                <button type="button" class="link" onClick={() => void restore(deleted.value!)}>
                  Undo
                </button>
              </>
            )}
          </p>
          <div class="prompt-tools">
            <button type="button" class="button button-main" onClick={() => edit(NEW)}>
              New prompt
            </button>
          </div>
        </>
      )}
    </Modal>
  );
}

interface FormProps {
  readonly prompt: PromptFields;
  readonly onSave: (old: PromptFields, fields: PromptFields) => Promise<void>;
  readonly onCancel: () => void;
}

function PromptForm({ prompt, onSave, onCancel }: FormProps) {
  const form = useRef<HTMLFormElement>(null);
  useLayoutEffect(() => form.current?.querySelector("input")?.focus(), []);
  const save = (data: FormData) => {
    const value = (name: keyof PromptFields) => String(data.get(name)).replace(/\r\n/g, "\n");
    return onSave(prompt, {
      name: value("name").trim(),
      text: value("text"),
      description: value("description").trim(),
    });
  };
  return (
    <form
      class="field"
      ref={form}
      aria-label={prompt === NEW ? "New saved prompt" : `Edit ${prompt.name}`}
      onSubmit={(event) => {
        event.preventDefault();
        void save(new FormData(event.currentTarget));
      }}
    >
      <label class="field">
        <span class="field-label">Name ({NAME_RULE})</span>
        <input
          type="text"
          name="name"
          required
          maxLength={64}
          pattern="[a-z0-9][a-z0-9\-]*"
          title={NAME_RULE}
          autocomplete="off"
          defaultValue={prompt.name}
        />
      </label>
      <label class="field">
        <span class="field-label">Description</span>
        <input
          type="text"
          name="description"
          maxLength={200}
          dir="auto"
          autocomplete="off"
          defaultValue={prompt.description}
        />
      </label>
      <label class="field">
        <span class="field-label">Text</span>
        <textarea name="text" rows={8} required maxLength={16_384} dir="auto" defaultValue={prompt.text} />
      </label>
      <p class="hint">{"{{language}}"} is a variable: the page asks for its value.</p>
      <div class="prompt-tools">
        <button type="submit" class="button button-main">
          Save for all users
        </button>
        <button type="button" class="button" onClick={onCancel}>
          Cancel
        </button>
      </div>
    </form>
  );
}
