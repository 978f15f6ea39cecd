// The cached share of each conversation.

import { signal } from "@preact/signals";
import * as rest from "../api/rest";

const REFRESH_MS = 20_000;
const DEBOUNCE_MS = 600; // several changes arrive at the end of an answer
const MAX_IDS = 100;
const WARM_SHARE = 0.9; // the newest tokens are computed only when they are needed
const COLD_SHARE = 0.05; // the beginning of the chat template is always cached

type CoverageLevel = "warm" | "partly" | "cold";

interface Coverage {
  readonly level: CoverageLevel;
  readonly text: string;
}

export class CacheCoverageWatch {
  private readonly coverage = signal<ReadonlyMap<string, Coverage>>(new Map());
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isSupported = true; // by this server

  /** `listedIds` returns the listed conversations, most relevant first. */
  constructor(private readonly listedIds: () => readonly string[]) {
    document.addEventListener("visibilitychange", () => this.scheduleRefresh());
  }

  of(id: string): Coverage | undefined {
    return this.coverage.value.get(id);
  }

  /** Refresh soon, and then periodically. */
  scheduleRefresh(): void {
    clearTimeout(this.timer);
    if (this.isSupported && !document.hidden) this.timer = setTimeout(() => void this.refresh(), DEBOUNCE_MS);
  }

  private async refresh(): Promise<void> {
    const ids = this.listedIds().slice(0, MAX_IDS);
    try {
      if (ids.length > 0) {
        const found = await rest.getCacheCoverage(ids);
        this.coverage.value = new Map(found.map((entry) => [entry.conversation_id, describeCoverage(entry)]));
      }
    } catch (error) {
      this.coverage.value = new Map(); // no value is better than a stale one
      this.isSupported = !(error instanceof rest.RequestError && [404, 405].includes(error.status));
    }
    clearTimeout(this.timer);
    if (this.isSupported && !document.hidden) this.timer = setTimeout(() => void this.refresh(), REFRESH_MS);
  }
}

export function describeCoverage({ tokens, cached_tokens }: rest.CacheCoverage): Coverage {
  const share = tokens > 0 ? cached_tokens / tokens : 0;
  const counts = `${cached_tokens.toLocaleString("en")} of ${tokens.toLocaleString("en")} tokens`;
  if (share >= WARM_SHARE) return { level: "warm", text: `Cached: ${counts}` };
  if (share >= COLD_SHARE) return { level: "partly", text: `Partly cached: ${counts}` };
  return { level: "cold", text: `Hardly cached: ${counts}. The next answer computes the rest` };
}
