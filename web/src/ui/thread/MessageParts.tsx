// Parts of a message: markdown text, reasoning, pending indicator, ending, version switcher, copy button.

import { effect, type ReadonlySignal, useComputed, useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { copyText } from "../../app/browser";
import { ENDINGS, type Message, type Status } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { DrawPacer, openStream } from "../../markdown/textStream";
import { useChat } from "../context";
import { Check, Copy, Left, Right } from "../icons";

export const pacer = new DrawPacer();

export function Markdown({ message }: { message: Message }) {
  return <MarkdownText message={message} source={message.text} />;
}

/** A text of a message, drawn as it grows. */
function MarkdownText({ message, source }: { message: Message; source: ReadonlySignal<string> }) {
  const root = useRef<HTMLDivElement>(null);
  // before the paint, so that a picked answer does not flicker
  useLayoutEffect(() => {
    if (!root.current) return;
    root.current.replaceChildren();
    const stream = openStream(root.current);
    let shown = false;
    const stop = effect(() => {
      const growing = message.status.value === "streaming" || message.status.value === "waiting";
      const text = source.value;
      if (growing && shown) pacer.schedule(stream, () => stream.update(text, false));
      else pacer.drawNow(stream, () => stream.update(text, !growing));
      shown = true;
    });
    return () => {
      stop();
      pacer.cancel(stream);
    };
  }, [message, source]);
  return <div class="prose" ref={root} />;
}

// Folded reasoning of an answer with its length. For a stored answer it is loaded when opened.

export function Reasoning({ message, turn }: { message: Message; turn: Turn | undefined }) {
  const { forks } = useChat();
  const text = message.reasoning.value;
  const open = useSignal(false); // a folded text is not drawn
  const isEmpty = useComputed(() => message.text.value === ""); // not the text itself, which changes with every frame
  const tokens = turn?.usage.value?.reasoningTokens ?? 0;
  const budget = turn?.sent?.settings.reasoningTokens ?? 0; // as requested by this page
  if (text === "" && tokens === 0) return null;
  const isReasoning = isEmpty.value && ["waiting", "streaming"].includes(message.status.value);
  return (
    <details
      class="reasoning"
      onToggle={(event) => {
        open.value = event.currentTarget.open;
        if (open.value) void forks.loadReasoning(message);
      }}
    >
      <summary>
        {isReasoning ? "Reasoning…" : "Reasoning"}, {reasoningLength(text, turn?.candidates.length === 1 ? tokens : 0)}
        {budget > 0 && ` of at most ${budget.toLocaleString("en")} tokens`}
      </summary>
      <div class="reasoning-text">{open.value && <MarkdownText message={message} source={message.reasoning} />}</div>
    </details>
  );
}

/** Length in tokens if known, else in words. */
function reasoningLength(text: string, tokens: number): string {
  if (tokens > 0) return `${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`;
  const words = text.split(/\s+/).filter(Boolean).length;
  if (words === 0) return "open to load";
  return `${words.toLocaleString("en")} ${words === 1 ? "word" : "words"}`;
}

// Indicator of what the server does before the first token.

const PHASE_LABELS = { queued: "Queued", prefill: "Processing the prompt", decode: "Generating", ended: "" } as const;

export function Pending({ turn }: { turn: Turn | undefined }) {
  const phase = turn?.phase.value ?? "queued";
  return (
    <p class="pending">
      <span class="pending-cells" aria-hidden="true">
        <i />
        <i />
        <i />
      </span>
      {turn?.beams && phase === "decode" ? "Searching" : PHASE_LABELS[phase]}
    </p>
  );
}

/** One word on the state of an answer among others. */
export const STATUS_LABELS: Readonly<Record<Status, string>> = {
  waiting: "waiting",
  streaming: "generating",
  done: "done",
  stopped: "stopped",
  steered: "stopped",
  interrupted: "interrupted",
  length: "cut off",
  error: "failed",
};

/** Note below an answer that was stopped, cut or failed. */
export function Ending({ message, alone = false }: { message: Message; alone?: boolean }) {
  const chat = useChat();
  const status = message.status.value;
  const ending = ENDINGS[status];
  if (ending !== undefined) {
    const isFull = chat.attachments.isFull.value && chat.thread.value.tree.value.leaf.value === message;
    return (
      <div class="ending">
        <span>
          {ending} {message.error.value}
        </span>
        {alone && status !== "steered" && !isFull && (
          <button
            type="button"
            class="button"
            disabled={!chat.forks.canContinue(message)}
            onClick={() => void chat.forks.continueAnswer(message)}
          >
            Continue
          </button>
        )}
      </div>
    );
  }
  if (status !== "error") return null;
  return (
    <div class="ending ending-error" role="alert">
      <span>{message.error.value}</span>
      {chat.thread.value.turnOf(message)?.isTooLong ? (
        <button type="button" class="button" onClick={editQuestion}>
          Edit
        </button>
      ) : (
        <button type="button" class="button" onClick={() => chat.regenerate(message)}>
          Try again
        </button>
      )}
    </div>
  );
}

/** Open the editor of the message above the clicked row. */
function editQuestion({ currentTarget }: MouseEvent): void {
  const above = (currentTarget as Element).closest(".row")?.previousElementSibling;
  above?.querySelector<HTMLElement>(".tool-edit")?.click();
}

// `< 2/3 >`: switch between the versions of a message.

export function VersionSwitcher({ message }: { message: Message }) {
  const chat = useChat();
  const siblings = chat.thread.value.tree.value.versions(message);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const go = (step: number) => {
    const target = siblings[at + step];
    if (target) chat.choose(target);
  };
  return (
    <span class="version-switcher" role="group" aria-label="Versions">
      <button type="button" class="tool" aria-label="Previous version" disabled={at === 0} onClick={() => go(-1)}>
        <Left />
      </button>
      <span class="version-position" aria-label={`Version ${at + 1} of ${siblings.length}`} role="img">
        {at + 1}/{siblings.length}
      </span>
      <button
        type="button"
        class="tool"
        aria-label="Next version"
        disabled={at === siblings.length - 1}
        onClick={() => go(1)}
      >
        <Right />
      </button>
    </span>
  );
}

// Button that copies a text and confirms it briefly.

export function CopyButton({ text, label = "Copy" }: { text: () => string; label?: string }) {
  const copied = useSignal(false);
  const copy = async () => {
    copied.value = await copyText(text());
    setTimeout(() => (copied.value = false), 1600);
  };
  return (
    <button
      type="button"
      class="tool"
      aria-label={copied.value ? "Copied" : label}
      title={label}
      onClick={() => void copy()}
    >
      {copied.value ? <Check /> : <Copy />}
    </button>
  );
}
