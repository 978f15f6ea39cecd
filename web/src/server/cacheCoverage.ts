// How much of each conversation is in the cache right now: a warm one answers without reading itself again.

import { signal } from "@preact/signals";
import * as rest from "../api/rest";
import { type CacheMap, getCacheMap } from "../api/rest";

const REFRESH_MS = 20_000;
const DEBOUNCE_MS = 600; // several things happen at the end of an answer
const MAX_IDS = 100;
const WARM_SHARE = 0.9; // the newest tokens are not computed before they are needed
const COLD_SHARE = 0.05; // how every prompt of the model begins is always there

export type CoverageLevel = "warm" | "partly" | "cold";

export interface Coverage {
  readonly level: CoverageLevel;
  readonly text: string;
}

export class CacheCoverageWatch {
  private readonly coverage = signal<ReadonlyMap<string, Coverage>>(new Map());
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isSupported = true; // by this server

  /** `ids`: the listed conversations, those most worth asking for first. */
  constructor(private readonly listedIds: () => readonly string[]) {
    document.addEventListener("visibilitychange", () => this.scheduleRefresh());
  }

  of(id: string): Coverage | undefined {
    return this.coverage.value.get(id);
  }

  /** Something changed: look in a moment, and from then on every now and then. */
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
      this.coverage.value = new Map(); // better none than old ones
      this.isSupported = !(error instanceof rest.RequestError && [404, 405].includes(error.status));
    }
    clearTimeout(this.timer);
    if (this.isSupported && !document.hidden) this.timer = setTimeout(() => void this.refresh(), REFRESH_MS);
  }
}

export function describeCoverage({ tokens, cached_tokens }: rest.CacheCoverage): Coverage {
  const share = tokens > 0 ? cached_tokens / tokens : 0;
  const counts = `${cached_tokens.toLocaleString("en")} of ${tokens.toLocaleString("en")} tokens are cached`;
  if (share >= WARM_SHARE) return { level: "warm", text: `Warm: ${counts}` };
  if (share >= COLD_SHARE) return { level: "partly", text: `Partly warm: ${counts}` };
  return { level: "cold", text: `Cold: ${counts}, the next turn reads the rest again` };
}

// ---- The page map, asked for once a second while somebody looks, and not at all while the tab is hidden.

const POLL_MS = 1000;

export class KvPageMapPoller {
  readonly current = signal<CacheMap | null>(null);
  readonly previousCells = signal<string>(""); // the cells of the look before
  readonly error = signal<string | null>(null);
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isActive = false;
  private isPolling = false;

  /** Look until the returned function is called. */
  start(): () => void {
    const turn = () => {
      clearTimeout(this.timer);
      if (!document.hidden) void this.poll();
    };
    this.isActive = true;
    document.addEventListener("visibilitychange", turn);
    turn();
    return () => {
      this.isActive = false;
      clearTimeout(this.timer);
      document.removeEventListener("visibilitychange", turn);
    };
  }

  private async poll(): Promise<void> {
    if (this.isPolling) return;
    this.isPolling = true;
    try {
      const map = await getCacheMap();
      this.previousCells.value = this.current.peek()?.cells ?? "";
      this.current.value = map;
      this.error.value = null;
    } catch (error) {
      this.error.value = (error as Error).message;
    }
    this.isPolling = false;
    if (this.isActive && !document.hidden) this.timer = setTimeout(() => void this.poll(), POLL_MS);
  }
}
