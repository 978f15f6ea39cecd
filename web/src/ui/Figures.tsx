// The line of figures below an answer: cache, speed, time to first token, and the receipt of a stop.
import { showStats } from "../state/settings";
import type { Turn } from "../state/turn";
import { PageStrip } from "./PageStrip";

export function Figures({ turn, strip = true }: { turn: Turn; strip?: boolean }) {
  const usage = turn.usage.value;
  if (!showStats.value || !usage) return null;
  const speed = turn.tokensPerSecond.value;
  const first = turn.firstTokenMs.value;
  const receipt = turn.receipt.value;
  return (
    <div class="figures">
      {strip && <PageStrip usage={usage} />}
      <span class="figure">
        <b class="ink-cached" data-figure="cached">{usage.cachedTokens}</b> cached
      </span>
      <span class="figure">
        <b class="ink-computed" data-figure="computed">{usage.inputTokens - usage.cachedTokens}</b> computed
      </span>
      {first !== null && <span class="figure"><b>{formatMs(first)}</b> to first token</span>}
      {speed !== null && <span class="figure"><b>{speed < 10 ? speed.toFixed(1) : Math.round(speed)}</b> tokens/s</span>}
      {receipt && (
        <span class="figure">
          stopped in <b>{formatMs(receipt.stop_latency_ms)}</b>, <b>{receipt.pages_freed}</b> pages freed
        </span>
      )}
    </div>
  );
}

export function formatMs(ms: number): string {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
