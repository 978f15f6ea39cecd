// A small sign while the reader types: what is written so far has been read by the server already.
import { useChat } from "./context";

export function CacheBadge() {
  const warm = useChat().prefill.progress.value;
  if (!warm) return null;
  const label = `Draft-ahead: ${warm.warmTokens} of ${warm.inputTokens} prompt tokens are computed while you type`;
  return (
    <span class="warm" role="img" aria-label={label} title={label} data-warm={warm.warmTokens}>
      <span class="dot dot-on" /><span class="warm-text"> warm</span>
    </span>
  );
}
