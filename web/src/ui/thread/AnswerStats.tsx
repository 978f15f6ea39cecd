// Statistics below an answer: cached and computed tokens, first cache miss, speed, time to first token, stop receipt.
import type { CacheMiss, StopReceipt } from "../../api/frames";
import { formatMs, plural } from "../../app/format";
import { showStats } from "../../app/settings";
import type { Usage } from "../../chat/tree";
import type { Turn } from "../../chat/turn";

/** Badge of an answer that the server keeps in memory because its store is unavailable. */
export function UnsavedBadge({ turn }: { turn: Turn }) {
  if (!turn.unsaved.value) return null;
  const title =
    "The server cannot store conversations right now. It keeps this answer in memory and stores it as soon as possible.";
  return (
    <span class="badge badge-warning" role="status" title={title}>
      Not saved yet
    </span>
  );
}

export function AnswerStats({ turn, strip = true }: { turn: Turn; strip?: boolean }) {
  const usage = turn.usage.value;
  if (!showStats.value || !usage) return null;
  const speed = turn.tokensPerSecond.value;
  const first = turn.firstTokenMs.value;
  const receipt = turn.receipt.value;
  const miss = turn.miss.value;
  return (
    <div class="stats">
      <ForkCostBadge turn={turn} usage={usage} />
      {strip && <CacheStrip usage={usage} />}
      <span class="stat">
        <b class="ink-cached" data-stat="cached">
          {usage.cachedTokens}
        </b>{" "}
        cached
      </span>
      <span class="stat">
        <b class="ink-computed" data-stat="computed">
          {usage.inputTokens - usage.cachedTokens}
        </b>{" "}
        computed
      </span>
      {miss && (
        <span
          class={`stat stat-miss ${isExpectedMiss(miss) ? "" : "stat-warning"}`}
          data-miss={miss.reason}
          title={miss.detail}
        >
          {describeMiss(miss)}
        </span>
      )}
      {first !== null && (
        <span class="stat">
          <b data-stat="first">{formatMs(first)}</b> to first token
        </span>
      )}
      {speed !== null && (
        <span class="stat">
          <b data-stat="speed">{speed < 10 ? speed.toFixed(1) : Math.round(speed)}</b> tokens/s
        </span>
      )}
      {receipt && (
        <span class="stat" data-stat="receipt">
          stopped in <b>{formatMs(receipt.stop_latency_ms)}</b>: <b>{plural(receipt.tokens_after_stop, "token")}</b>{" "}
          after, <b>{plural(receipt.pages_freed, "page")}</b> freed
        </span>
      )}
    </div>
  );
}

/** Cost of a fork inside an answer, as reported by the server. */
function ForkCostBadge({ turn, usage }: { turn: Turn; usage: Usage }) {
  const copied = turn.copiedPages.value;
  if (!turn.start || copied === null) return null;
  const pages = turn.start.inspectedPages === null ? null : turn.start.inspectedPages + copied;
  const prefilled = prefilledTokens(usage);
  const position = turn.start.token
    ? `after token ${turn.start.keepTokens}, with “${turn.start.token.text.trim()}”`
    : `after token ${turn.start.keepTokens}`;
  const shared = `${usage.cachedTokens} of ${usage.inputTokens} prompt tokens are shared with the original`;
  const title = `Branched ${position}: ${shared}.`;
  return (
    <span class="badge fork-chip" title={title} data-copied={pages ?? undefined} data-prefilled={prefilled}>
      {pages === null ? "Branched" : `${plural(pages, "page")} copied`}, {plural(prefilled, "token")} computed
    </span>
  );
}

/** Number of tokens prefilled again. The last prompt token is always computed by the step that samples the next one. */
export function prefilledTokens(usage: Usage): number {
  return Math.max(0, usage.inputTokens - usage.cachedTokens - 1);
}

const MISS_REASONS: Readonly<Record<string, string>> = {
  never_computed: "new text",
  evicted: "its place in the cache was needed for other texts",
  diverged: "the text differs from there",
  no_state: "the model kept no state to continue from",
  template_changed: "the chat format changed earlier messages",
};

/** Whether the tokens had to be computed anyway: no cache could have held them. */
export function isExpectedMiss({ reason }: CacheMiss): boolean {
  return reason === "never_computed" || reason === "diverged";
}

/** Describe the first cache miss in plain words. */
export function describeMiss(miss: CacheMiss): string {
  return `computed from token ${miss.at_token}: ${MISS_REASONS[miss.reason] ?? miss.reason}`;
}

// -- Strip of cells: which part of the prompt was cached (filled) and which was computed (outlined)

const CELL_TOKENS = 16;
const MAX_CELLS = 32;

export function CacheStrip({ usage }: { usage: Usage }) {
  const cells = toCells(usage);
  return (
    <span
      class="cache-strip"
      role="img"
      aria-label={describeUsage(usage)}
      title={`${describeUsage(usage)}. One cell: ${cells.tokens} tokens.`}
    >
      {cells.kinds.map((kind, index) => (
        <i key={index} class={`cell cell-${kind}`} />
      ))}
    </span>
  );
}

function describeUsage(usage: Usage): string {
  const computed = usage.inputTokens - usage.cachedTokens;
  return `${usage.inputTokens} prompt tokens: ${usage.cachedTokens} from the cache, ${computed} computed`;
}

type CellKind = "cached" | "computed";

/** Return one cell per 16 prompt tokens; more tokens per cell for a long prompt. */
export function toCells(usage: Usage): { kinds: readonly CellKind[]; tokens: number } {
  const tokens = CELL_TOKENS * Math.max(1, Math.ceil(usage.inputTokens / CELL_TOKENS / MAX_CELLS));
  const count = Math.max(1, Math.ceil(usage.inputTokens / tokens));
  const kinds = Array.from({ length: count }, (_, index): CellKind => {
    const start = index * tokens;
    const size = Math.min(tokens, usage.inputTokens - start); // the last cell may be partial
    return usage.cachedTokens - start >= size / 2 ? "cached" : "computed"; // the majority of its tokens decides
  });
  return { kinds, tokens };
}

// Note on a dropped candidate: pages freed and tokens generated after the drop.

export function DroppedNote({ receipt }: { receipt: StopReceipt }) {
  return (
    <p class="ending" data-dropped={receipt.pages_freed}>
      Dropped: {plural(receipt.pages_freed, "page")} freed, {plural(receipt.tokens_after_stop, "token")} after.
    </p>
  );
}
