// How much of each conversation is in the cache right now: a warm one answers without reading itself again.
import { signal } from "@preact/signals";
import * as rest from "../wire/rest";

const LOOK_MS = 20_000;
const SOON_MS = 600; // several things happen at the end of an answer
const MAX_ASKED = 100;
const WARM = 0.9; // the newest tokens are not computed before they are needed
const COLD = 0.05; // how every prompt of the model begins is always there

export type Degree = "warm" | "partly" | "cold";

export interface Warm {
  readonly degree: Degree;
  readonly words: string;
}

export class Warmth {
  private readonly known = signal<ReadonlyMap<string, Warm>>(new Map());
  private timer: ReturnType<typeof setTimeout> | undefined;
  private offered = true; // by this server

  /** `ids`: the listed conversations, those most worth asking for first. */
  constructor(private readonly ids: () => readonly string[]) {
    document.addEventListener("visibilitychange", () => this.soon());
  }

  of(id: string): Warm | undefined {
    return this.known.value.get(id);
  }

  /** Something changed: look in a moment, and from then on every now and then. */
  soon(): void {
    clearTimeout(this.timer);
    if (this.offered && !document.hidden) this.timer = setTimeout(() => void this.look(), SOON_MS);
  }

  private async look(): Promise<void> {
    const ids = this.ids().slice(0, MAX_ASKED);
    try {
      if (ids.length > 0) {
        const found = await rest.warmth(ids);
        this.known.value = new Map(found.map((entry) => [entry.conversation_id, degreeOf(entry)]));
      }
    } catch (error) {
      this.known.value = new Map(); // better none than old ones
      this.offered = !(error instanceof rest.RequestFailed && [404, 405].includes(error.status));
    }
    clearTimeout(this.timer);
    if (this.offered && !document.hidden) this.timer = setTimeout(() => void this.look(), LOOK_MS);
  }
}

export function degreeOf({ tokens, cached_tokens }: rest.Warmth): Warm {
  const share = tokens > 0 ? cached_tokens / tokens : 0;
  const counts = `${cached_tokens.toLocaleString("en")} of ${tokens.toLocaleString("en")} tokens are cached`;
  if (share >= WARM) return { degree: "warm", words: `Warm: ${counts}` };
  if (share >= COLD) return { degree: "partly", words: `Partly warm: ${counts}` };
  return { degree: "cold", words: `Cold: ${counts}, the next turn reads the rest again` };
}
