// The door: where the server wants a key, the page stays outside until somebody hands one in.

import { effect, untracked } from "@preact/signals";
import { getIdentity, type Identity, RequestError, signIn } from "../api/rest";
import type { Socket } from "../api/socket";
import { toast } from "../app/notifications";
import type { Conversations } from "../conversations/conversations";

export class Auth {
  private owner: string | null = null; // whose chats this page has shown, once that is known

  /** `startOver`: forget all that this page shows; somebody else is there. */
  constructor(
    private readonly socket: Socket,
    private readonly conversations: Conversations,
    private readonly reset: () => void,
  ) {
    effect(() => {
      if (["lost", "refused"].includes(socket.state.value)) untracked(() => void this.checkSession());
    });
  }

  /** Connect and fill the list; false where it is locked. */
  async connect(): Promise<boolean> {
    this.socket.connect();
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") {
      this.socket.refuse();
      return false;
    }
    void getIdentity().then(
      (who) => (this.owner = identityKey(who)),
      () => {},
    );
    return true;
  }

  /** Hand in a key for a session; false where it opens nothing, which is told. */
  async signIn(key: string): Promise<boolean> {
    let owner: string;
    try {
      owner = identityKey(await signIn(key));
    } catch (error) {
      toast(signInError(error));
      return false;
    }
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") {
      toast("This browser keeps no cookies for this page: nobody can stay signed in.");
      return false;
    }
    if (this.isOtherUser(owner)) return false;
    this.owner = owner;
    this.socket.reopen();
    return true;
  }

  /** The connection is gone: was it the session? Then only a key helps; or another tab has signed in as somebody else. */
  private async checkSession(): Promise<void> {
    const ended = await getIdentity().then(
      (who) => this.isOtherUser(identityKey(who)),
      (error) => this.conversations.lockIfUnauthorized(error),
    );
    if (ended) this.socket.refuse();
  }

  /** Start over if this is not whose chats are shown. */
  private isOtherUser(owner: string): boolean {
    if (this.owner === null || owner === this.owner) return false;
    this.reset();
    return true;
  }
}

/** Load the page anew, at no conversation. */
export function resetPage(): void {
  history.replaceState(null, "", location.pathname + location.search);
  location.reload();
}

function identityKey({ tenant, user }: Identity): string {
  return JSON.stringify([tenant, user]);
}

/** Why a key was not taken. */
function signInError(error: unknown): string {
  if (!(error instanceof RequestError) || error.status !== 401) return "Signing in failed. Try again.";
  return error.code === "api_key_revoked" ? "This key was revoked." : "The server does not know this key.";
}
