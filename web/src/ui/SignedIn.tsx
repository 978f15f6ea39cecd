// The signed-in user: signing out, and the way to the administration.

import type { Identity } from "../api/rest";
import { leaveSession } from "./commands";
import { useChat } from "./context";
import { toggleDialog } from "./navigation";

const DIGEST = /^[0-9a-f]{12,}$/; // the tenant of a key without a name is its digest

function signedInName({ tenant, user }: Identity): string {
  if (user) return `${tenant}/${user}`;
  return DIGEST.test(tenant) ? `the holder of an API key (${tenant.slice(0, 6)})` : tenant;
}

export function SignedInSection() {
  const chat = useChat();
  const identity = chat.auth.identity.value;
  if (identity === null || (identity.key_id === null && !identity.is_admin)) return null;
  return (
    <div class="panel-section">
      {identity.is_admin && (
        <button type="button" class="button" onClick={() => toggleDialog("administration")}>
          Administration
        </button>
      )}
      {identity.key_id !== null && (
        <>
          <p class="hint">Signed in as {signedInName(identity)}.</p>
          <button type="button" class="button" onClick={() => void leaveSession(chat)}>
            Sign out
          </button>
        </>
      )}
    </div>
  );
}
