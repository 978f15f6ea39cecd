// Full-text search over every branch of every conversation. A newer query discards the response to an older one.

import { signal } from "@preact/signals";
import * as rest from "../api/rest";
import { announce } from "../app/notifications";

const DEBOUNCE_MS = 150; // of typing

export class Search {
  readonly query = signal("");
  readonly state = signal<"idle" | "looking" | "done" | "failed">("idle");
  readonly hits = signal<readonly rest.SearchHit[]>([]);
  readonly hasMore = signal(false);
  private next: string | null = null;
  private requestId = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  set(query: string): void {
    this.query.value = query;
    clearTimeout(this.timer);
    this.requestId++;
    if (query.trim() === "") {
      this.state.value = "idle";
      this.hits.value = [];
      return;
    }
    this.state.value = "looking";
    this.timer = setTimeout(() => void this.run(), DEBOUNCE_MS);
  }

  async loadMore(): Promise<void> {
    if (this.next !== null) await this.run(this.next);
  }

  private async run(after?: string): Promise<void> {
    const requestId = ++this.requestId;
    try {
      const page = await rest.searchConversations(this.query.value.trim(), after);
      if (requestId !== this.requestId) return;
      this.hits.value = after ? [...this.hits.value, ...page.data] : page.data;
      this.next = page.next;
      this.hasMore.value = page.has_more;
      this.state.value = "done";
      const count = this.hits.value.length;
      announce(count === 0 ? "No results." : `${count}${page.has_more ? " or more" : ""} results.`);
    } catch {
      if (requestId === this.requestId) this.state.value = "failed";
    }
  }
}

interface MarkedPiece {
  readonly text: string;
  readonly marked: boolean;
}

/** Split a text at its marks. Marks count characters, not UTF-16 units. */
export function splitAtMarks(text: string, marks: readonly rest.TextRange[]): readonly MarkedPiece[] {
  const chars = [...text];
  const pieces: MarkedPiece[] = [];
  let at = 0;
  const cut = (end: number, marked: boolean) => {
    if (end > at) pieces.push({ text: chars.slice(at, end).join(""), marked });
    at = Math.max(at, end);
  };
  for (const [start, end] of marks) {
    cut(start, false);
    cut(end, true);
  }
  cut(chars.length, false);
  return pieces;
}
