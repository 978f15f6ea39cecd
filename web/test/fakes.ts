// The other ends of the page's wires, in the hands of a test.
import { vi } from "vitest";

/** A socket whose other end is the test. */
export class FakeSocket {
  static readonly OPEN = 1;
  static last: FakeSocket;
  readyState = 0;
  readonly sent: Record<string, unknown>[] = [];
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string }) => void) | null = null;
  onclose: ((event: { code: number }) => void) | null = null;
  constructor(
    readonly url: string,
    readonly protocols: string[],
  ) {
    FakeSocket.last = this;
  }
  open(): void {
    this.readyState = 1;
    this.onopen?.();
  }
  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>);
  }
  close(code = 1006): void {
    this.readyState = 3;
    this.onclose?.({ code });
  }
  push(frame: object): void {
    this.onmessage?.({ data: JSON.stringify(frame) });
  }
}

/** One request that the page made. */
export interface Call {
  method: string;
  path: string;
  body: unknown;
  headers: unknown;
}

/** What the REST server answers, by path, and what it was asked. */
export class FakeServer {
  readonly calls: Call[] = [];
  readonly replies: Record<string, unknown> = {};
  readonly statuses: Record<string, number> = {};

  readonly fetch = (url: URL, init: RequestInit) => {
    const path = url.pathname;
    const body = init.body ? (JSON.parse(init.body as string) as unknown) : null;
    this.calls.push({ method: init.method!, path, body, headers: init.headers });
    const status = this.statuses[path] ?? 200;
    return Promise.resolve({ ok: status === 200, status, json: () => Promise.resolve(this.replies[path] ?? {}) });
  };
}

/** Put fake wires in place of the browser's. */
export function fakeWires(): FakeServer {
  const server = new FakeServer();
  vi.useFakeTimers();
  vi.stubGlobal("WebSocket", FakeSocket);
  vi.stubGlobal("requestAnimationFrame", (run: () => void) => setTimeout(run, 16));
  vi.stubGlobal("fetch", server.fetch);
  return server;
}
