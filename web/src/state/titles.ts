// The model names a conversation after its first answer, and whenever it is asked to. A title that somebody gave it
// meanwhile stays.
import type { WireConversation } from "../wire/frames";
import * as rest from "../wire/rest";
import { announce } from "./announcer";
import type { Conversations } from "./conversations";
import { toast } from "./toast";

const TRIES = 3;

export class Titler {
  private readonly fresh: Map<string, string | null>; // begun in this tab, not named yet: the title they began with

  constructor(private readonly conversations: Conversations) {
    this.fresh = new Map(recall());
  }

  /** A conversation began on this page. */
  began(head: WireConversation): void {
    if (this.fresh.has(head.id)) return;
    this.fresh.set(head.id, head.title);
    remember([...this.fresh]);
  }

  /** Let the model name it, now that somebody asks for that. */
  async suggest(id: string): Promise<void> {
    const before = this.conversations.find(id)?.title;
    try {
      const head = await this.conversations.mine(rest.nameConversation(id));
      announce(`The title is now ${head.title}.`);
      if (head.title === before) toast("The model has no better title.");
    } catch (error) {
      toast(`No title. ${(error as Error).message}`);
    }
  }

  /** An answer is complete: if it was the first one, ask for a name. */
  async answered(id: string): Promise<void> {
    const title = this.fresh.get(id);
    if (title === undefined) return;
    this.fresh.delete(id);
    remember([...this.fresh]);
    let head = this.conversations.find(id);
    for (let tries = 0; head && head.title === title && tries < TRIES; tries++) {
      try {
        await this.conversations.mine(rest.nameConversation(id, head.rev));
        return;
      } catch (error) {
        // something else changed: perhaps the title, then it stays. Without a model there is no name, and no harm.
        head = error instanceof rest.RequestFailed ? (error.present ?? undefined) : undefined;
      }
    }
  }
}

type Fresh = readonly [string, string | null][];
const NAME = "chatcache.unnamed";

/** A reload in the middle of the first answer must not cost the name. */
function remember(fresh: Fresh): void {
  try {
    sessionStorage.setItem(NAME, JSON.stringify(fresh));
  } catch {
    // storage is off
  }
}

function recall(): Fresh {
  try {
    return JSON.parse(sessionStorage.getItem(NAME) ?? "[]") as Fresh;
  } catch {
    return [];
  }
}
