// What the model reasoned before it spoke: folded, with its length. Of a stored answer it is fetched when opened.
import { useComputed } from "@preact/signals";
import type { Message } from "../state/tree";
import type { Turn } from "../state/turn";
import { useChat } from "./context";

export function Reasoning({ message, turn }: { message: Message; turn: Turn | undefined }) {
  const { forks } = useChat();
  const text = message.reasoning.value;
  const silent = useComputed(() => message.text.value === ""); // not the text itself: it changes with every frame
  const tokens = turn?.usage.value?.reasoningTokens ?? 0;
  if (text === "" && tokens === 0) return null;
  const thinking = silent.value && ["waiting", "streaming"].includes(message.status.value);
  return (
    <details
      class="thought"
      onToggle={(event) => {
        if (event.currentTarget.open) void forks.loadReasoning(message);
      }}
    >
      <summary>
        {thinking ? "Thinking" : "Thought"}, {reasoningLength(text, turn?.candidates.length === 1 ? tokens : 0)}
      </summary>
      <div class="thought-text">{text}</div>
    </details>
  );
}

/** Tokens where they are known, else words. */
export function reasoningLength(text: string, tokens: number): string {
  if (tokens > 0) return `${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`;
  const words = text.split(/\s+/).filter(Boolean).length;
  if (words === 0) return "open to read";
  return `${words.toLocaleString("en")} ${words === 1 ? "word" : "words"}`;
}
