// The system prompt of this conversation, and prompts with names to choose from: ready-made ones and the reader's own.
import { useSignal } from "@preact/signals";
import { MAX_SYSTEM_CHARS } from "../state/metadata";
import type { Preset } from "../state/presets";
import { allPrompts, isCustom, savePrompt, customPrompts, findPrompt, removePrompt, restorePrompt } from "../state/prompts";
import { systemPrompt } from "../state/settings";
import { toast } from "../state/toast";

export function SystemPrompts() {
  const editing = useSignal<Preset | "new" | null>(null);
  const text = systemPrompt.value;
  const chosen = findPrompt(text);
  const own = chosen && isCustom(chosen) ? chosen : null;
  const remove = (preset: Preset) => {
    const place = customPrompts.value.indexOf(preset);
    removePrompt(preset);
    toast(`“${preset.name}” deleted.`, { label: "Undo", run: () => restorePrompt(preset, place) });
  };
  if (editing.value !== null) {
    return <PromptForm preset={editing.value === "new" ? null : editing.value} onClose={() => (editing.value = null)} />;
  }
  return (
    <fieldset class="field">
      <legend>System prompt</legend>
      <div class="segments">
        {allPrompts.value.map((preset) => (
          <button
            key={preset.name}
            type="button"
            aria-pressed={text === preset.text}
            title={preset.text}
            onClick={() => (systemPrompt.value = preset.text)}
          >
            {preset.name}
          </button>
        ))}
      </div>
      <textarea
        id="system"
        rows={4}
        aria-label="System prompt"
        placeholder="How should the assistant behave?"
        value={text}
        onChange={(event) => (systemPrompt.value = event.currentTarget.value)}
      />
      <div class="prompt-tools">
        {own ? (
          <>
            <button type="button" class="link" onClick={() => (editing.value = own)}>Edit “{own.name}”</button>
            <button type="button" class="link link-danger" onClick={() => remove(own)}>Delete it</button>
          </>
        ) : (
          <button type="button" class="link" onClick={() => (editing.value = "new")}>
            {text && !chosen ? "Keep this one under a name…" : "New prompt…"}
          </button>
        )}
      </div>
      <p class="hint">
        {[...text].length > MAX_SYSTEM_CHARS
          ? `Over ${MAX_SYSTEM_CHARS.toLocaleString("en")} characters: it works, but the conversation forgets it with a reload.`
          : "It belongs to this conversation. Chats that start with the same text share its pages."}
      </p>
    </fieldset>
  );
}

function PromptForm({ preset, onClose }: { preset: Preset | null; onClose: () => void }) {
  const wrong = useSignal<string | null>(null);
  const text = preset?.text ?? (findPrompt(systemPrompt.value) ? "" : systemPrompt.value);
  const save = (form: HTMLFormElement) => {
    const data = new FormData(form);
    const said = String(data.get("text"));
    wrong.value = savePrompt(String(data.get("name")), said, preset);
    if (wrong.value !== null) return;
    systemPrompt.value = said;
    onClose();
  };
  return (
    <form
      class="field prompt-form"
      aria-label={preset ? `Edit ${preset.name}` : "New prompt"}
      onSubmit={(event) => {
        event.preventDefault();
        save(event.currentTarget);
      }}
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        onClose();
      }}
    >
      <label class="field">
        <span class="field-label">Name</span>
        <input type="text" name="name" maxLength={40} defaultValue={preset?.name ?? ""} autocomplete="off" ref={(input) => input?.focus()} />
      </label>
      <label class="field">
        <span class="field-label">Prompt</span>
        <textarea name="text" rows={6} defaultValue={text} />
      </label>
      {wrong.value !== null && <p class="ending-error" role="alert">{wrong.value}</p>}
      <div class="prompt-tools">
        <button type="submit" class="button button-main">Keep</button>
        <button type="button" class="button" onClick={onClose}>Cancel</button>
      </div>
    </form>
  );
}
