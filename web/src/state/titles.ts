// The model names a conversation after its first answer, and whenever it is asked to. A title that somebody gave it
// meanwhile stays.
import type { WireConversation } from "../wire/frames";
import * as rest from "../wire/rest";
import { announce } from "./announcer";
import type { Conversations } from "./conversations";
import { toast } from "./toast";

const MAX_ATTEMPTS = 3;

export class AutoTitler {
  private readonly untitled: Map<string, string | null>; // begun in this tab, not named yet: the title they began with

  constructor(private readonly conversations: Conversations) {
    this.untitled = new Map(loadUntitled());
  }

  /** A conversation began on this page. */
  onStarted(head: WireConversation): void {
    if (this.untitled.has(head.id)) return;
    this.untitled.set(head.id, head.title);
    saveUntitled([...this.untitled]);
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
    saveUntitled([...this.untitled]);
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
}

type UntitledEntries = readonly [string, string | null][];
const STORAGE_KEY = "chatcache.unnamed";

/** A reload in the middle of the first answer must not cost the name. */
function saveUntitled(fresh: UntitledEntries): void {
  try {
    sessionStorage.setItem(STORAGE_KEY, JSON.stringify(fresh));
  } catch {
    // storage is off
  }
}

function loadUntitled(): UntitledEntries {
  try {
    return JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "[]") as UntitledEntries;
  } catch {
    return [];
  }
}
