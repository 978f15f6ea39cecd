// Generates conversation titles with the model: after the first answer, and on request. A title that was set in the
// meantime is kept.
import type { WireConversation } from "../api/frames";
import * as rest from "../api/rest";
import { load, save } from "../app/browser";
import { announce, toast } from "../app/notifications";
import type { Conversations } from "./conversations";

const MAX_ATTEMPTS = 3;
const STORAGE_KEY = "untitled";

export class AutoTitler {
  // conversations started in this tab without a generated title -> initial title
  private readonly untitled: Map<string, string | null>;

  constructor(private readonly conversations: Conversations) {
    this.untitled = new Map(load<readonly [string, string | null][]>(STORAGE_KEY, [], "session"));
  }

  /** A conversation was started on this page. */
  onStarted(head: WireConversation): void {
    if (this.untitled.has(head.id)) return;
    this.untitled.set(head.id, head.title);
    this.saveUntitled();
  }

  /** Generate a title on request of the user. */
  async suggest(id: string): Promise<void> {
    const before = this.conversations.find(id)?.title;
    try {
      const head = await this.conversations.trackOwnChange(rest.generateTitle(id));
      announce(`The title is now ${head.title}.`);
      if (head.title === before) toast("The model generated the same title.");
    } catch (error) {
      toast(`No title generated. ${(error as Error).message}`);
    }
  }

  /** An answer is complete: generate a title if it was the first answer. */
  async onAnswered(id: string): Promise<void> {
    const title = this.untitled.get(id);
    if (title === undefined) return;
    this.untitled.delete(id);
    this.saveUntitled();
    let head = this.conversations.find(id);
    for (let tries = 0; head && head.title === title && tries < MAX_ATTEMPTS; tries++) {
      try {
        await this.conversations.trackOwnChange(rest.generateTitle(id, head.rev));
        return;
      } catch (error) {
        // A conflict: if the title changed it is kept, else retry with the new revision. Other errors leave the title
        // as it is.
        head = error instanceof rest.RequestError ? (error.current ?? undefined) : undefined;
      }
    }
  }

  /** Keep the list across a reload during the first answer. */
  private saveUntitled(): void {
    save(STORAGE_KEY, [...this.untitled], "session");
  }
}
