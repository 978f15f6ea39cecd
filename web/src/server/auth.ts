// Sign-in state: locks the page if the server requires an API key, and resets it if the user changes.

import { effect, signal, untracked } from "@preact/signals";
import { getIdentity, type Identity, RequestError, signIn } from "../api/rest";
import type { Socket } from "../api/socket";
import { clearPersonalData, load, onStoredElsewhere, save } from "../app/browser";
import { toast } from "../app/notifications";
import type { Conversations } from "../conversations/conversations";

const OWNER = "owner"; // name of the stored value

export class Auth {
  readonly identity = signal<Identity | null>(null); // null: not known yet
  private owner: string | null = load<string | null>(OWNER, null); // user whose data the page and the browser have

  /** `reset` discards everything that the page shows, because another user is signed in. */
  constructor(
    private readonly socket: Socket,
    private readonly conversations: Conversations,
    private readonly reset: () => void,
  ) {
    effect(() => {
      if (["lost", "refused"].includes(socket.state.value)) untracked(() => void this.checkSession());
      if (socket.state.value === "open") untracked(() => void this.identify());
    });
    onStoredElsewhere(OWNER, () => this.owner !== null && load(OWNER, null) !== this.owner && this.leave());
  }

  /** Connect and load the list; false if the page is locked. */
  async connect(): Promise<boolean> {
    this.socket.connect();
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") {
      this.socket.refuse();
      return false;
    }
    return true;
  }

  /** Find out who is signed in, unless the server is unreachable: the next connection tries again. */
  private async identify(): Promise<void> {
    const identity = await getIdentity().catch(() => null);
    if (identity === null || this.isOtherUser(identityKey(identity))) return;
    this.setIdentity(identity);
  }

  private setIdentity(identity: Identity): void {
    const owner = identityKey(identity);
    this.identity.value = identity;
    this.owner = owner;
    save(OWNER, owner);
    void this.conversations.copies.setOwner(owner);
  }

  /** Sign in with a key; false if that failed, which a toast reports. */
  async signIn(key: string): Promise<boolean> {
    let identity: Identity;
    try {
      identity = await signIn(key);
    } catch (error) {
      toast(signInError(error));
      return false;
    }
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") {
      toast("The browser blocks cookies for this page, so signing in is not possible.");
      return false;
    }
    if (this.isOtherUser(identityKey(identity))) return false;
    this.setIdentity(identity);
    this.socket.reopen();
    return true;
  }

  /** The connection was lost: lock the page if the session ended, reset it if another tab signed in as another user. */
  private async checkSession(): Promise<void> {
    const ended = await getIdentity().then(
      (who) => this.isOtherUser(identityKey(who)),
      (error) => this.conversations.lockIfUnauthorized(error),
    );
    if (ended) this.socket.refuse();
  }

  /** Reset the page if its conversations belong to another user. */
  private isOtherUser(owner: string): boolean {
    if (this.owner === null || owner === this.owner) return false;
    void this.leave();
    return true;
  }

  /** Delete what the browser has stored of the user, and reset the page. */
  async leave(): Promise<void> {
    clearPersonalData();
    await this.conversations.copies.clear();
    this.reset();
  }
}

/** Reload the page without a conversation. */
export function resetPage(): void {
  history.replaceState(null, "", location.pathname + location.search);
  location.reload();
}

function identityKey({ tenant, user }: Identity): string {
  return JSON.stringify([tenant, user]);
}

/** Describe why a key was refused. */
function signInError(error: unknown): string {
  if (!(error instanceof RequestError) || error.status !== 401) return "Signing in failed. Try again.";
  return error.code === "api_key_revoked" ? "This key was revoked." : "Invalid API key.";
}
