// Reconnecting WebSocket: full-jitter backoff, immediate retry when the network or the tab becomes active again,
// no retry after a close code that a retry cannot fix.

import { signal } from "@preact/signals";
import type { ClientFrame, ServerFrame } from "./frames";

type ConnectionState = "connecting" | "open" | "lost" | "refused";

const PROTOCOLS = ["chatcache.v1"];
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 15_000;
const FATAL_CLOSE_CODES = new Set([4400, 4401, 4403]);

export class Socket {
  readonly state = signal<ConnectionState>("connecting");
  readonly opened = signal(0); // number of connections opened so far
  private socket: WebSocket | null = null;
  private attempts = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly url: string,
    private readonly onFrame: (frame: ServerFrame) => void,
  ) {
    addEventListener("online", () => this.retryNow());
    addEventListener("offline", () => this.handleOffline());
    addEventListener("pageshow", (event) => event.persisted && this.retryNow());
    document.addEventListener("visibilitychange", () => !document.hidden && this.retryNow());
  }

  connect(): void {
    const socket = new WebSocket(this.url, PROTOCOLS);
    this.socket = socket;
    socket.onopen = () => {
      if (this.socket !== socket) return;
      this.attempts = 0;
      this.opened.value++;
      this.state.value = "open";
    };
    socket.onmessage = (event) => {
      if (this.socket === socket && typeof event.data === "string") this.onFrame(JSON.parse(event.data) as ServerFrame);
    };
    socket.onclose = (event) => {
      if (this.socket !== socket) return;
      this.socket = null;
      if (FATAL_CLOSE_CODES.has(event.code) || this.state.value === "refused") this.state.value = "refused";
      else this.retryLater();
    };
  }

  /** Send a frame; false if the connection is not open. */
  send(frame: ClientFrame): boolean {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(frame));
    return true;
  }

  retryNow(): void {
    if (this.socket || this.state.value === "refused") return;
    clearTimeout(this.timer);
    this.connect();
  }

  /** Replace a connection that may be dead although it looks open. */
  reconnect(): void {
    if (this.state.value !== "open") {
      this.retryNow();
      return;
    }
    this.detach();
    this.state.value = "connecting";
    this.connect();
  }

  /** The network is gone: do not wait for the connection to time out. */
  private handleOffline(): void {
    if (!this.socket) return;
    this.detach();
    this.retryLater();
  }

  private detach(): void {
    const socket = this.socket;
    this.socket = null; // ignore further events of this socket
    socket?.close();
  }

  /** Stop reconnecting: a retry cannot fix the refusal. */
  refuse(): void {
    clearTimeout(this.timer);
    this.state.value = "refused";
    this.socket?.close();
  }

  /** Reconnect after a refusal whose cause is resolved. */
  reopen(): void {
    this.state.value = "connecting";
    this.retryNow();
  }

  private retryLater(): void {
    if (this.opened.value > 0 || this.attempts > 0) this.state.value = "lost";
    const ceiling = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.attempts++);
    this.timer = setTimeout(() => this.retryNow(), FIRST_RETRY_MS / 2 + Math.random() * ceiling);
  }
}

/** Return the WebSocket URL, relative to the page so that a common path prefix keeps working. */
export function socketUrl(): string {
  const url = new URL("v1/responses", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}

// -- Wake detection: after a sleep, connections look open but are dead; a jump of the clock reveals the sleep

const TICK_MS = 4000;
const SLEPT_MS = 20_000; // timers of hidden tabs are throttled to one per second, later to one per minute
const HIDDEN_MS = 60_000;

/** Call `onWake` after the computer slept, and when a long-hidden tab becomes visible. Call once. */
export function watchWake(onWake: () => void): void {
  let last = Date.now();
  let hiddenAt: number | null = null;
  setInterval(() => {
    const slept = Date.now() - last > SLEPT_MS && !document.hidden;
    last = Date.now();
    if (slept) onWake();
  }, TICK_MS);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) hiddenAt = Date.now();
    else if (hiddenAt !== null && Date.now() - hiddenAt > HIDDEN_MS) onWake();
    last = Date.now();
  });
}
