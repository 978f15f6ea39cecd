// The message box with its controls: system prompt, number of answers, settings, cache badge, context meter.

import { useEffect, useRef } from "preact/hooks";
import { announce } from "../app/notifications";
import { allPrompts, findPrompt } from "../app/prompts";
import { MAX_N, sampling, setSampling, systemPrompt } from "../app/settings";
import { useChat } from "./context";
import { Chevron, Minus, Plus, Send, Sliders, Stop } from "./icons";
import { panel, togglePanel } from "./navigation";

const MAX_HEIGHT_PX = 220;

export function Composer() {
  const chat = useChat();
  const area = useRef<HTMLTextAreaElement>(null);
  const text = chat.prefill.text;
  const live = chat.live.value;
  const ready = chat.ready.value;

  const resize = () => {
    const box = area.current;
    if (!box) return;
    box.style.height = "auto";
    box.style.height = `${Math.min(MAX_HEIGHT_PX, box.scrollHeight)}px`;
  };
  useEffect(() => area.current?.focus(), [chat.thread.value]);
  const send = () => {
    const message = text.value.trim();
    if (message === "" || live || !ready) return;
    text.value = "";
    if (area.current) area.current.value = "";
    resize();
    chat.send(message);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && text.value === "") {
      const edits = document.querySelectorAll<HTMLButtonElement>(".user-message .tool-edit");
      const last = edits.item(edits.length - 1);
      if (last) {
        event.preventDefault();
        last.click();
      }
    }
  };
  return (
    <div class="composer-area">
      <Suggestions />
      <form
        class="composer"
        onSubmit={(event) => {
          event.preventDefault();
          send();
        }}
      >
        <textarea
          ref={area}
          id="composer"
          rows={1}
          aria-label="Message"
          placeholder={placeholder()}
          onInput={(event) => {
            text.value = event.currentTarget.value;
            resize();
          }}
          onKeyDown={onKeyDown}
        />
        <div class="composer-foot">
          <SystemPromptSelect />
          <AnswerCount />
          <button
            type="button"
            class="chip"
            aria-label="Settings"
            aria-expanded={panel.value === "settings"}
            title="Settings"
            onClick={() => togglePanel("settings")}
          >
            <Sliders />
          </button>
          <span class="spacer" />
          <CacheBadge />
          <ContextMeter />
          {live ? (
            <button
              type="button"
              class="send send-stop"
              aria-label="Stop"
              title="Stop (Esc)"
              onClick={() => chat.stop()}
            >
              <Stop />
            </button>
          ) : (
            <button
              type="submit"
              class="send"
              aria-label="Send"
              title="Send (Enter)"
              disabled={text.value.trim() === "" || !ready}
            >
              <Send />
            </button>
          )}
        </div>
      </form>
    </div>
  );
}

function Suggestions() {
  const chat = useChat();
  const thread = chat.thread.value;
  if (thread.live.value || thread.suggestions.value.length === 0 || thread.tree.value.path.value.length === 0)
    return null;
  return (
    <div class="suggestions">
      {thread.suggestions.value.map((text) => (
        <button key={text} type="button" class="chip chip-suggestion" onClick={() => chat.send(text)}>
          {text}
        </button>
      ))}
    </div>
  );
}

function SystemPromptSelect() {
  const isNamed = findPrompt(systemPrompt.value) !== undefined;
  return (
    <label class="chip chip-select" title="System prompt">
      <span class="sr-only">System prompt</span>
      <select
        value={isNamed ? systemPrompt.value : "custom"}
        onChange={(event) => {
          if (event.currentTarget.value === "custom") togglePanel("settings", true);
          else systemPrompt.value = event.currentTarget.value;
        }}
      >
        {allPrompts.value.map((preset) => (
          <option key={preset.name} value={preset.text}>
            {preset.name}
          </option>
        ))}
        <option value="custom">Custom…</option>
      </select>
      <Chevron />
    </label>
  );
}

function AnswerCount() {
  const { n, search } = sampling.value;
  const noun = search === "beam" ? "beams" : n === 1 ? "answer" : "answers";
  const set = (next: number) => {
    setSampling({ n: Math.min(MAX_N, Math.max(1, next)) });
    announce(`${sampling.value.n} answers per message`);
  };
  return (
    <span class="chip chip-counter" role="group" aria-label="Answers per message">
      <button type="button" aria-label="Fewer answers" disabled={n <= 1} onClick={() => set(n - 1)}>
        <Minus />
      </button>
      <span class="answer-count" data-n={n}>
        <b>{n}</b> {noun}
      </span>
      <button type="button" aria-label="More answers" disabled={n >= MAX_N} onClick={() => set(n + 1)}>
        <Plus />
      </button>
    </span>
  );
}

function placeholder(): string {
  const { n, search } = sampling.value;
  if (search === "beam") return `Send a message, search with ${Math.max(2, n)} beams`;
  return n > 1 ? `Send a message, get ${n} answers` : "Send a message";
}

const NEARLY_FULL = 0.85;

function ContextMeter() {
  const chat = useChat();
  const limit = chat.session.value?.max_model_len ?? chat.readiness.contextTokens.value;
  const used = chat.thread.value.contextTokens.value;
  if (limit === 0 || used === 0) return null;
  const share = Math.min(1, used / limit);
  const label = `Context: ${used} of ${limit} tokens`;
  return (
    <span class={`meter ${share > NEARLY_FULL ? "meter-full" : ""}`} role="img" aria-label={label} title={label}>
      <svg viewBox="0 0 20 20" aria-hidden="true">
        <circle class="meter-track" cx="10" cy="10" r="7.5" />
        <circle class="meter-fill" cx="10" cy="10" r="7.5" pathLength="100" stroke-dasharray={`${share * 100} 100`} />
      </svg>
      <span class="meter-text">
        {used.toLocaleString("en")} / {limit.toLocaleString("en")}
      </span>
    </span>
  );
}

function CacheBadge() {
  const progress = useChat().prefill.progress.value;
  if (!progress) return null;
  const label = `Prefill while typing: ${progress.warmTokens} of ${progress.inputTokens} prompt tokens are cached`;
  return (
    <span class="cache-badge" role="img" aria-label={label} title={label} data-cached={progress.warmTokens}>
      <span class="dot dot-on" />
      <span class="cache-badge-text"> cached</span>
    </span>
  );
}
