// Test doubles of the server and of the browser.
import { vi } from "vitest";

/** A WebSocket whose server side is the test. */
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

/** One request made by the page. */
export interface Call {
  method: string;
  path: string;
  body: unknown;
  headers: unknown;
}

/** A REST server with a reply per path, which records the requests. */
export class FakeServer {
  readonly calls: Call[] = [];
  readonly replies: Record<string, unknown> = {};
  readonly statuses: Record<string, number> = {};

  readonly fetch = (url: URL, init: RequestInit) => {
    const path = url.pathname;
    const body = typeof init.body === "string" ? (JSON.parse(init.body) as unknown) : (init.body ?? null);
    this.calls.push({ method: init.method!, path, body, headers: init.headers });
    const status = this.statuses[path] ?? 200;
    return Promise.resolve({ ok: status === 200, status, json: () => Promise.resolve(this.replies[path] ?? {}) });
  };
}

/** Browser globals of the kind that the page's logic uses, for tests that run without a DOM. */
export class FakeDocument extends EventTarget {
  readonly baseURI = "http://test/";
  hidden = false;
  querySelector(): null {
    return null;
  }
}

class FakeStorage {
  getItem(name: string): string | null {
    return (this as unknown as Record<string, string>)[name] ?? null;
  }
  setItem(name: string, value: string): void {
    (this as unknown as Record<string, string>)[name] = value;
  }
}

/** Stub the browser's globals; `vi.unstubAllGlobals` restores them. */
export function fakeBrowser(): FakeDocument {
  const fakeDocument = new FakeDocument();
  const fakeWindow = new EventTarget();
  vi.stubGlobal("document", fakeDocument);
  vi.stubGlobal("addEventListener", fakeWindow.addEventListener.bind(fakeWindow));
  vi.stubGlobal("location", new URL("http://test/"));
  vi.stubGlobal("localStorage", new FakeStorage());
  vi.stubGlobal("sessionStorage", new FakeStorage());
  return fakeDocument;
}

/** Stub the WebSocket, `fetch`, animation frames and timers; without a DOM also the browser's globals. */
export function fakeNetwork(): FakeServer {
  if (typeof document === "undefined") fakeBrowser();
  const server = new FakeServer();
  vi.useFakeTimers();
  vi.stubGlobal("WebSocket", FakeSocket);
  vi.stubGlobal("requestAnimationFrame", (run: () => void) => setTimeout(run, 16));
  vi.stubGlobal("fetch", server.fetch);
  return server;
}
