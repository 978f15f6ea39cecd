// The door: where the server wants a key, the page stays outside until somebody hands one in.
import { effect, untracked } from "@preact/signals";
import { RequestFailed } from "../wire/rest";
import { signIn, whoAmI } from "../wire/session";
import type { Socket } from "../wire/socket";
import type { Conversations } from "./conversations";
import { toast } from "./toast";

export class Door {
  constructor(private readonly socket: Socket, private readonly conversations: Conversations) {
    effect(() => {
      if (["lost", "refused"].includes(socket.state.value)) untracked(() => void this.knock());
    });
  }

  /** Connect and fill the list; false where it is locked. */
  async enter(): Promise<boolean> {
    this.socket.connect();
    await this.conversations.refresh();
    if (this.conversations.state.value !== "locked") return true;
    this.socket.refuse();
    return false;
  }

  /** Hand in a key for a session; false where it opens nothing, which is told. */
  async unlock(key: string): Promise<boolean> {
    try {
      await signIn(key);
    } catch (error) {
      toast(refusalOf(error));
      return false;
    }
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") {
      toast("This browser keeps no cookies for this page: nobody can stay signed in.");
      return false;
    }
    this.socket.admit();
    return true;
  }

  /** The connection is gone: was it the session? Then only a key helps. */
  private async knock(): Promise<void> {
    const ended = await whoAmI().then(() => false, (error) => this.conversations.lock(error));
    if (ended) this.socket.refuse();
  }
}

/** Why a key was not taken. */
function refusalOf(error: unknown): string {
  if (!(error instanceof RequestFailed) || error.status !== 401) return "Signing in failed. Try again.";
  return error.code === "api_key_revoked" ? "This key was revoked." : "The server does not know this key.";
}
