// Signing in. The API key goes to the server once; what comes back is a cookie that no script sees and that the browser
// sends along by itself, on both wires. The key is kept nowhere.
import { call } from "./rest";

/** Who the server takes us for; `key_id` is null where it wants no keys. */
export interface Identity {
  readonly key_id: string | null;
  readonly tenant: string;
  readonly user: string;
}

export function signIn(key: string): Promise<Identity> {
  return call("POST", "v1/session", undefined, { headers: { authorization: `Bearer ${key}` } });
}

export function signOut(): Promise<unknown> {
  return call("DELETE", "v1/session");
}

export function getIdentity(): Promise<Identity> {
  return call("GET", "v1/session");
}
