// The message box with its controls: system prompt, number of answers, settings, cache badge, context meter.

import { useLayoutEffect, useRef } from "preact/hooks";
import { announce } from "../app/notifications";
import { allPrompts, choosePrompt, findPrompt } from "../app/prompts";
import { MAX_N, sampling, setSampling, systemPrompt } from "../app/settings";
import { PASTED_FILE_CHARS } from "../chat/attachments";
import { AttachButton, AttachmentChips } from "./Attachments";
import { useChat } from "./context";
import { Chevron, Close, Minus, Plus, Queue, Send, Sliders, Stop } from "./icons";
import { lazy } from "./lazy";
import { focusComposer, isTouch, panel, restoredConversation, togglePanel } from "./navigation";
import { VoiceButton } from "./VoiceButton";

const PromptMenu = lazy(async () => (await import("./prompts/PromptMenu")).PromptMenu);
const PROMPT_NAME = /^\/[a-z0-9-]*$/; // the beginning of a message that names a saved prompt
const MAX_HEIGHT_PX = 220;
const FULL = "This chat is full. Start a new chat, or edit an earlier message.";

export function Composer() {
  const chat = useChat();
  const area = useRef<HTMLTextAreaElement>(null);
  const text = chat.prefill.text;
  const { attachments } = chat;
  const live = chat.live.value;
  const thread = chat.thread.value;
  const ready = chat.ready.value;
  const isFull = live === null && attachments.isFull.value;

  const resize = () => {
    const box = area.current;
    if (!box) return;
    box.style.height = "auto";
    box.style.height = `${Math.min(MAX_HEIGHT_PX, box.scrollHeight)}px`;
  };
  useLayoutEffect(() => {
    if (restoredConversation.value === null || restoredConversation.value !== thread.id.value) focusComposer();
    restoredConversation.value = null;
  }, [thread]);
  useLayoutEffect(() => {
    const box = area.current;
    if (!box || box.value === text.value) return;
    box.value = text.value; // not typed: a draft, a saved prompt, or the text of a message that was refused
    resize();
  }, [text.value]); // before the next key: it would replace the new text
  const hasContent = text.value.trim() !== "" || attachments.ready.value.length > 0;
  const send = (queue = false) => {
    if (!hasContent || !ready) return;
    if (isFull) return announce(FULL);
    if (attachments.isReading.value) return announce("A file is still being read.");
    if (!attachments.fit.value) return announce("The files are too long for the model.");
    const message = text.value.trim();
    const files = attachments.take();
    text.value = "";
    if (queue && live) chat.unsent.enqueue(message, files);
    else chat.send(message, {}, files);
    focusComposer(); // the pressed button may go
  };
  const onPaste = (event: ClipboardEvent) => {
    const pasted = event.clipboardData?.getData("text/plain") ?? "";
    const files = [...(event.clipboardData?.files ?? [])];
    if (pasted.length <= PASTED_FILE_CHARS && (pasted !== "" || files.length === 0)) return;
    event.preventDefault();
    if (pasted !== "") attachments.paste(pasted);
    else void attachments.add(files);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch()) {
      event.preventDefault();
      send(event.altKey);
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
      {isFull ? <FullNotice /> : <Suggestions />}
      {thread.refusal.value && (
        <p class="full-notice" role="alert">
          {thread.refusal.value}
        </p>
      )}
      <QueuedMessages />
      {PROMPT_NAME.test(text.value) && <PromptMenu area={area} />}
      <form
        class="composer"
        onSubmit={(event) => {
          event.preventDefault();
          send();
        }}
      >
        <AttachmentChips />
        <textarea
          ref={area}
          id="composer"
          rows={1}
          aria-label="Message"
          dir="auto"
          enterkeyhint={isTouch() ? "enter" : "send"}
          placeholder={placeholder()}
          onInput={(event) => {
            text.value = event.currentTarget.value;
            resize();
          }}
          onKeyDown={onKeyDown}
          onPaste={onPaste}
        />
        <div class="composer-foot">
          <VoiceButton area={area} />
          <div class="composer-options">
            <AttachButton />
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
            <SystemPromptSelect />
            <AnswerCount />
          </div>
          <CacheBadge />
          <ContextMeter />
          {live && hasContent && (
            <>
              <button
                type="button"
                class="chip queue"
                aria-label="Queue"
                title="Send after this answer (Alt+Enter)"
                onClick={() => send(true)}
              >
                <Queue />
                <span class="queue-label">Queue</span>
              </button>
              <button
                type="submit"
                class="send"
                aria-label="Stop the answer and send"
                title="Stop the answer here and send (Enter)"
                disabled={!attachments.fit.value || !ready}
              >
                <Send />
              </button>
            </>
          )}
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
              title={isFull ? FULL : "Send (Enter)"}
              disabled={!hasContent || isFull || attachments.isReading.value || !attachments.fit.value || !ready}
            >
              <Send />
            </button>
          )}
        </div>
      </form>
    </div>
  );
}

/** The context is full: what can be done about it. */
function FullNotice() {
  const chat = useChat();
  return (
    <div class="full-notice" role="status">
      <span>{FULL}</span>
      <button type="button" class="button" onClick={() => chat.unsent.carryTo(() => chat.newConversation())}>
        New chat
      </button>
    </div>
  );
}

/** Messages that wait for the running answer. */
function QueuedMessages() {
  const chat = useChat();
  const thread = chat.thread.value;
  const queued = thread.queued.value;
  if (queued.length === 0) return null;
  return (
    <ul class="queued" aria-label="Queued messages" onClick={() => focusComposer()}>
      {queued.map((message) => (
        <li key={message} class="chip">
          <span class="queued-text" dir="auto">
            {[...message.files.map(({ name }) => `[${name}]`), message.text].join(" ")}
          </span>
          <button
            type="button"
            class="tool"
            aria-label="Remove from the queue"
            onClick={() => chat.unsent.dequeue(message)}
          >
            <Close />
          </button>
        </li>
      ))}
      {!thread.live.value && (
        <li>
          <button type="button" class="chip" disabled={!chat.ready.value} onClick={() => chat.unsent.sendFirst()}>
            Send the first
          </button>
        </li>
      )}
    </ul>
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
  const prompts = allPrompts.value;
  const chosen = findPrompt(systemPrompt.value);
  return (
    <label class="chip chip-select" title="System prompt">
      <span class="sr-only">System prompt</span>
      <select
        value={chosen ? prompts.indexOf(chosen) : "custom"}
        onChange={(event) => {
          const preset = prompts[Number(event.currentTarget.value)];
          if (preset) choosePrompt(preset);
          else togglePanel("settings", true);
        }}
      >
        {prompts.map((preset, index) => (
          <option key={preset.name} value={index}>
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
  const limit = chat.maxTokens.value;
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
  const label = `Processed while you type: ${progress.warmTokens} of ${progress.inputTokens} prompt tokens are cached`;
  return (
    <span class="cache-badge" role="img" aria-label={label} title={label} data-cached={progress.warmTokens}>
      <span class="dot dot-on" />
      <span class="cache-badge-text"> cached</span>
    </span>
  );
}
