// The line of figures below an answer: cache and why the first miss, speed, time to first token, the receipt of a stop.
import { showStats } from "../state/settings";
import type { Usage } from "../state/tree";
import type { Turn } from "../state/turn";
import type { CacheMiss } from "../wire/frames";
import { CacheStrip } from "./PageStrip";

/** Said of an answer that the server holds in memory because its store is away. */
export function UnsavedBadge({ turn }: { turn: Turn }) {
  if (!turn.unsaved.value) return null;
  const title = "The server cannot store conversations right now. It keeps this answer in memory and stores it as soon as it can.";
  return <span class="badge badge-warning" role="status" title={title}>Not saved yet</span>;
}

export function AnswerStats({ turn, strip = true }: { turn: Turn; strip?: boolean }) {
  const usage = turn.usage.value;
  if (!showStats.value || !usage) return null;
  const speed = turn.tokensPerSecond.value;
  const first = turn.firstTokenMs.value;
  const receipt = turn.receipt.value;
  const miss = turn.miss.value;
  return (
    <div class="figures">
      <ForkCostBadge turn={turn} usage={usage} />
      {strip && <CacheStrip usage={usage} />}
      <span class="figure">
        <b class="ink-cached" data-figure="cached">{usage.cachedTokens}</b> cached
      </span>
      <span class="figure">
        <b class="ink-computed" data-figure="computed">{usage.inputTokens - usage.cachedTokens}</b> computed
      </span>
      {miss && <span class="figure figure-why" data-why={miss.reason} title={miss.detail}>{describeMiss(miss)}</span>}
      {first !== null && <span class="figure"><b data-figure="first">{formatMs(first)}</b> to first token</span>}
      {speed !== null && <span class="figure"><b data-figure="speed">{speed < 10 ? speed.toFixed(1) : Math.round(speed)}</b> tokens/s</span>}
      {receipt && (
        <span class="figure" data-figure="receipt">
          stopped in <b>{formatMs(receipt.stop_latency_ms)}</b>: <b>{plural(receipt.tokens_after_stop, "token")}</b> after,{" "}
          <b>{plural(receipt.pages_freed, "page")}</b> freed
        </span>
      )}
    </div>
  );
}

/** What branching inside an answer cost, as the server counted it. */
function ForkCostBadge({ turn, usage }: { turn: Turn; usage: Usage }) {
  const copied = turn.copiedPages.value;
  if (!turn.start || copied === null) return null;
  const pages = turn.start.inspectedPages + copied;
  const prefilled = prefilledTokens(usage);
  const place = turn.start.token ? `after token ${turn.start.keepTokens}, with “${turn.start.token.text.trim()}”` : `after token ${turn.start.keepTokens}`;
  const title = `Branched ${place}: of ${usage.inputTokens} tokens before the next one, ${usage.cachedTokens} were shared with the original.`;
  return (
    <span class="badge fork-chip" title={title} data-copied={pages} data-prefilled={prefilled}>
      {plural(pages, "page")} copied, {plural(prefilled, "token")} prefilled
    </span>
  );
}

/** Tokens that were read again. The last one before the next is computed in the step that writes the next, always. */
export function prefilledTokens(usage: Usage): number {
  return Math.max(0, usage.inputTokens - usage.cachedTokens - 1);
}

const MISS_REASONS: Readonly<Record<string, string>> = {
  never_computed: "new text",
  evicted: "evicted: its pages were needed elsewhere",
  diverged: "differs from what is cached",
  template_changed: "the chat template rewrites the history",
};

/** The first miss in words. */
export function describeMiss(miss: CacheMiss): string {
  return `from token ${miss.at_token}: ${MISS_REASONS[miss.reason] ?? miss.reason}`;
}

export function plural(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function formatMs(ms: number): string {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
