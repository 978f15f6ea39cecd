// The settings panel: system prompt, sampling, defaults for new chats, browser settings, sign-out.

import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { announce, toast } from "../app/notifications";
import {
  allPrompts,
  choosePrompt,
  customPrompts,
  findPrompt,
  isCustom,
  type Preset,
  removePrompt,
  restorePrompt,
  savePrompt,
} from "../app/prompts";
import {
  autoTitle,
  clickForAlternatives,
  DEFAULT_SAMPLING,
  hasDefaults,
  makeDefaults,
  prefillWhileTyping,
  sameSampling,
  sampling,
  shouldAutoTitle,
  showStats,
  systemPrompt,
} from "../app/settings";
import { MAX_SYSTEM_CHARS } from "../conversations/metadata";
import { useChat } from "./context";
import { Close } from "./icons";
import { focusComposer, isTouch, panel } from "./navigation";
import { RareSettings } from "./RareSettings";
import { SamplingSettings } from "./SamplingSettings";
import { SignedInSection } from "./SignedIn";
import { ToolSettings } from "./ToolSettings";

export function Settings() {
  const chat = useChat();
  const root = useRef<HTMLElement>(null);
  const opener = useRef<Element | null>(null);
  useLayoutEffect(() => {
    opener.current = document.activeElement;
    root.current?.querySelector<HTMLElement>("button")?.focus();
  }, []);
  const close = () => {
    panel.value = null;
    if (isTouch() && opener.current instanceof HTMLElement) opener.current.focus();
    else focusComposer();
  };
  return (
    <aside class="panel" aria-label="Settings" ref={root}>
      <header class="panel-head">
        <h2>Settings</h2>
        <button type="button" class="tool" aria-label="Close settings" onClick={close}>
          <Close />
        </button>
      </header>
      <SystemPrompts />
      <SamplingSettings />
      <RareSettings />
      <ToolSettings />
      <DefaultsSection />
      <h3 class="panel-section-title">This browser</h3>
      <label class="check">
        <input
          type="checkbox"
          checked={shouldAutoTitle(chat.session.value?.model)}
          onChange={(event) => (autoTitle.value = event.currentTarget.checked)}
        />
        Generate titles with the model
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked={showStats.value}
          onChange={(event) => (showStats.value = event.currentTarget.checked)}
        />
        Show statistics below each answer
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked={prefillWhileTyping.value}
          onChange={(event) => (prefillWhileTyping.value = event.currentTarget.checked)}
        />
        Process the prompt while typing
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked={clickForAlternatives.value}
          onChange={(event) => (clickForAlternatives.value = event.currentTarget.checked)}
        />
        Clicking a word shows its alternatives
      </label>
      <SignedInSection />
    </aside>
  );
}

/** Compare the settings of this conversation with the defaults, and offer to copy or reset them. */
function DefaultsSection() {
  const plain = sameSampling(sampling.value, DEFAULT_SAMPLING);
  const same = hasDefaults();
  const keep = () => {
    makeDefaults();
    announce("Default settings saved.");
  };
  return (
    <div class="panel-section">
      <p class="hint">
        {same ? "These settings are the default for new chats." : "These settings apply to this conversation only."}
      </p>
      <button type="button" class="button" disabled={same} onClick={keep}>
        Use as default for new chats
      </button>
      <button type="button" class="button" disabled={plain} onClick={() => (sampling.value = DEFAULT_SAMPLING)}>
        Reset sampling
      </button>
    </div>
  );
}

// -- System prompt: of this conversation, and the list of named prompts

function SystemPrompts() {
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
    return (
      <PromptForm preset={editing.value === "new" ? null : editing.value} onClose={() => (editing.value = null)} />
    );
  }
  return (
    <fieldset class="field">
      <legend>System prompt</legend>
      <div class="segments">
        {allPrompts.value.map((preset) => (
          <button
            key={preset.name}
            type="button"
            aria-pressed={preset === chosen}
            title={preset.text}
            onClick={() => choosePrompt(preset)}
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
            <button type="button" class="link" onClick={() => (editing.value = own)}>
              Edit “{own.name}”
            </button>
            <button type="button" class="link link-danger" onClick={() => remove(own)}>
              Delete prompt
            </button>
          </>
        ) : (
          <button type="button" class="link" onClick={() => (editing.value = "new")}>
            {text && !chosen ? "Save this prompt…" : "New prompt…"}
          </button>
        )}
      </div>
      <p class="hint">
        {[...text].length > MAX_SYSTEM_CHARS
          ? `Over ${MAX_SYSTEM_CHARS.toLocaleString("en")} characters: it is used, but not stored with the conversation.`
          : "Applies to this conversation. Chats with the same system prompt share its KV pages."}
      </p>
    </fieldset>
  );
}

function PromptForm({ preset, onClose }: { preset: Preset | null; onClose: () => void }) {
  const wrong = useSignal<string | null>(null);
  const text = preset?.text ?? (findPrompt(systemPrompt.value) ? "" : systemPrompt.value);
  const save = (form: HTMLFormElement) => {
    const data = new FormData(form);
    wrong.value = savePrompt(String(data.get("name")), String(data.get("text")), preset);
    if (wrong.value === null) onClose();
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
        <input
          type="text"
          name="name"
          maxLength={40}
          defaultValue={preset?.name ?? ""}
          autocomplete="off"
          ref={(input) => input?.focus()}
        />
      </label>
      <label class="field">
        <span class="field-label">Prompt</span>
        <textarea name="text" rows={6} defaultValue={text} />
      </label>
      {wrong.value !== null && (
        <p class="ending-error" role="alert">
          {wrong.value}
        </p>
      )}
      <div class="prompt-tools">
        <button type="submit" class="button button-main">
          Save
        </button>
        <button type="button" class="button" onClick={onClose}>
          Cancel
        </button>
      </div>
    </form>
  );
}
