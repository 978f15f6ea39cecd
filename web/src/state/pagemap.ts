// The page map, asked for once a second while somebody looks, and not at all while the tab is hidden.
import { signal } from "@preact/signals";
import { type CacheMap, getCacheMap } from "../wire/cacheMap";

const LOOK_MS = 1000;

export class PageMapWatch {
  readonly now = signal<CacheMap | null>(null);
  readonly before = signal<string>(""); // the cells of the look before
  readonly failure = signal<string | null>(null);
  private timer: ReturnType<typeof setTimeout> | undefined;
  private watching = false;
  private asking = false;

  /** Look until the returned function is called. */
  watch(): () => void {
    const turn = () => {
      clearTimeout(this.timer);
      if (!document.hidden) void this.look();
    };
    this.watching = true;
    document.addEventListener("visibilitychange", turn);
    turn();
    return () => {
      this.watching = false;
      clearTimeout(this.timer);
      document.removeEventListener("visibilitychange", turn);
    };
  }

  private async look(): Promise<void> {
    if (this.asking) return;
    this.asking = true;
    try {
      const map = await getCacheMap();
      this.before.value = this.now.peek()?.cells ?? "";
      this.now.value = map;
      this.failure.value = null;
    } catch (error) {
      this.failure.value = (error as Error).message;
    }
    this.asking = false;
    if (this.watching && !document.hidden) this.timer = setTimeout(() => void this.look(), LOOK_MS);
  }
}
