// Whether the server can answer yet. The page is there before the model is loaded; it says how far that is.
import { signal } from "@preact/signals";

const LOOK_MS = 700;
const GLANCE_MS = 4000;

export type Readiness =
  | { readonly phase: "unknown" | "ready" }
  | { readonly phase: "loading" | "unavailable"; readonly detail: string; readonly progress: number };

interface ReadyBody {
  readonly status?: string;
  readonly detail?: string;
  readonly progress?: number;
  readonly max_model_len?: number;
}

export class ReadinessWatch {
  readonly now = signal<Readiness>({ phase: "unknown" });
  readonly contextTokens = signal(0);
  private looking = false;

  /** Look until the server is ready. */
  async watch(): Promise<void> {
    if (this.looking) return;
    this.looking = true;
    while (!(await this.look())) await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    this.looking = false;
  }

  /** Look now and then, so that a model that died is noticed before somebody asks it. Call once. */
  keepWatch(): void {
    setInterval(() => {
      if (!document.hidden) void this.watch();
    }, GLANCE_MS);
  }

  /** Look once; true when there is nothing to wait for. */
  private async look(): Promise<boolean> {
    try {
      const reply = await fetch(new URL("readyz", document.baseURI), { credentials: "same-origin" });
      const body = (await reply.json()) as ReadyBody;
      if (reply.ok) {
        this.contextTokens.value = body.max_model_len ?? 0;
        this.now.value = { phase: "ready" };
        return true;
      }
      const phase = body.status === "loading" ? "loading" : "unavailable";
      this.now.value = { phase, detail: body.detail ?? "", progress: body.progress ?? 0 };
      return false;
    } catch {
      return true; // no server at all: the socket tells that, and asks again when it is back
    }
  }
}
