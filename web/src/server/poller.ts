// A value of the server that is read periodically while it is shown and the tab is visible.

import { signal } from "@preact/signals";

export class Poller<T> {
  readonly current = signal<T | null>(null);
  readonly previous = signal<T | null>(null); // value of the poll before
  readonly error = signal<string | null>(null);
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isActive = false;
  private isPolling = false;

  constructor(
    private readonly read: () => Promise<T>,
    private readonly intervalMs: number,
  ) {}

  /** Poll until the returned function is called. */
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
      const value = await this.read();
      this.previous.value = this.current.peek();
      this.current.value = value;
      this.error.value = null;
    } catch (error) {
      this.error.value = (error as Error).message;
    }
    this.isPolling = false;
    if (this.isActive && !document.hidden) this.timer = setTimeout(() => void this.poll(), this.intervalMs);
  }
}
