// The model names a conversation after its first answer, and whenever it is asked to. A title that somebody gave it
// meanwhile stays.
import type { WireConversation } from "../api/frames";
import * as rest from "../api/rest";
import { load, save } from "../app/browser";
import { announce, toast } from "../app/notifications";
import type { Conversations } from "./conversations";

const MAX_ATTEMPTS = 3;
const STORAGE_KEY = "untitled";

export class AutoTitler {
  private readonly untitled: Map<string, string | null>; // begun in this tab, not named yet: the title they began with

  constructor(private readonly conversations: Conversations) {
    this.untitled = new Map(load<readonly [string, string | null][]>(STORAGE_KEY, [], "session"));
  }

  /** A conversation began on this page. */
  onStarted(head: WireConversation): void {
    if (this.untitled.has(head.id)) return;
    this.untitled.set(head.id, head.title);
    this.saveUntitled();
  }

  /** Let the model name it, now that somebody asks for that. */
  async suggest(id: string): Promise<void> {
    const before = this.conversations.find(id)?.title;
    try {
      const head = await this.conversations.trackOwnChange(rest.generateTitle(id));
      announce(`The title is now ${head.title}.`);
      if (head.title === before) toast("The model has no better title.");
    } catch (error) {
      toast(`No title. ${(error as Error).message}`);
    }
  }

  /** An answer is complete: if it was the first one, ask for a name. */
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
        // something else changed: perhaps the title, then it stays. Without a model there is no name, and no harm.
        head = error instanceof rest.RequestError ? (error.current ?? undefined) : undefined;
      }
    }
  }

  /** Keep the list across a reload during the first answer. */
  private saveUntitled(): void {
    save(STORAGE_KEY, [...this.untitled], "session");
  }
}
