// Where an answer's prompt came from, drawn as cells: filled ones were in the cache, hatched ones were computed.
import type { Usage } from "../state/tree";

const CELL_TOKENS = 16;
const MAX_CELLS = 32;

export function CacheStrip({ usage }: { usage: Usage }) {
  const cells = toCells(usage);
  return (
    <span class="strip" role="img" aria-label={describeUsage(usage)} title={`${describeUsage(usage)}. One cell: ${cells.tokens} tokens.`}>
      {cells.kinds.map((kind, index) => (
        <i key={index} class={`cell cell-${kind}`} />
      ))}
    </span>
  );
}

export function describeUsage(usage: Usage): string {
  const computed = usage.inputTokens - usage.cachedTokens;
  return `${usage.inputTokens} prompt tokens: ${usage.cachedTokens} from the cache, ${computed} computed`;
}

type CellKind = "cached" | "computed";

/** One cell per 16 prompt tokens, or more tokens per cell where the prompt is long. */
export function toCells(usage: Usage): { kinds: readonly CellKind[]; tokens: number } {
  const tokens = CELL_TOKENS * Math.max(1, Math.ceil(usage.inputTokens / CELL_TOKENS / MAX_CELLS));
  const count = Math.max(1, Math.ceil(usage.inputTokens / tokens));
  const kinds = Array.from({ length: count }, (_, index): CellKind => {
    const start = index * tokens;
    const size = Math.min(tokens, usage.inputTokens - start); // the last cell may stand for less
    return usage.cachedTokens - start >= size / 2 ? "cached" : "computed"; // as most of its tokens are
  });
  return { kinds, tokens };
}
