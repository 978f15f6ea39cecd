// Readiness of the server. The page is served before the model is loaded; it shows the progress.
import { signal } from "@preact/signals";

const POLL_MS = 700;
const IDLE_POLL_MS = 4000;

type Readiness =
  | { readonly phase: "unknown" | "ready" }
  | { readonly phase: "loading" | "unavailable"; readonly detail: string; readonly progress: number };

interface ReadyBody {
  readonly status?: string;
  readonly detail?: string;
  readonly progress?: number;
  readonly max_model_len?: number;
}

export class ReadinessPoller {
  readonly status = signal<Readiness>({ phase: "unknown" });
  readonly contextTokens = signal(0);
  readonly isPolling = signal(false);

  /** Poll until the server is ready. */
  async pollUntilReady(): Promise<void> {
    if (this.isPolling.value) return;
    this.isPolling.value = true;
    while (!(await this.poll())) await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    this.isPolling.value = false;
  }

  /** Poll periodically, so that a failed model is noticed before the next request. Call once. */
  pollPeriodically(): void {
    setInterval(() => {
      if (!document.hidden) void this.pollUntilReady();
    }, IDLE_POLL_MS);
  }

  /** Poll once; true if there is nothing to wait for. */
  private async poll(): Promise<boolean> {
    try {
      const reply = await fetch(new URL("readyz", document.baseURI), { credentials: "same-origin" });
      const body = (await reply.json()) as ReadyBody;
      if (reply.ok) {
        this.contextTokens.value = body.max_model_len ?? 0;
        this.status.value = { phase: "ready" };
        return true;
      }
      const phase = body.status === "loading" ? "loading" : "unavailable";
      this.status.value = { phase, detail: body.detail ?? "", progress: body.progress ?? 0 };
      return false;
    } catch {
      return true; // the server is unreachable: the socket reports that and triggers polling when it is back
    }
  }
}
