// The page map, asked for once a second while somebody looks, and not at all while the tab is hidden.
import { signal } from "@preact/signals";
import { type CacheMap, getCacheMap } from "../wire/cacheMap";

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
