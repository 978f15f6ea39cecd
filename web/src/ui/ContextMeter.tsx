// How much of the model's context the conversation fills.
import { useChat } from "./context";

const NEARLY_FULL = 0.85;

export function ContextMeter() {
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
      <span class="meter-text">{used.toLocaleString("en")} / {limit.toLocaleString("en")}</span>
    </span>
  );
}
