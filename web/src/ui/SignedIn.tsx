// The signed-in user: signing out, and the way to the administration.

import { useEffect, useState } from "preact/hooks";
import { getIdentity, type Identity, signOut } from "../api/rest";
import { toast } from "../app/notifications";
import { useChat } from "./context";
import { togglePanel } from "./navigation";

const DIGEST = /^[0-9a-f]{12,}$/; // the tenant of a key without a name is its digest

function signedInName({ tenant, user }: Identity): string {
  if (user) return `${tenant}/${user}`;
  return DIGEST.test(tenant) ? `the holder of an API key (${tenant.slice(0, 6)})` : tenant;
}

export function SignedInSection() {
  const { auth } = useChat();
  const [identity, setIdentity] = useState<Identity | null>(null);
  useEffect(() => {
    getIdentity().then(setIdentity, () => {});
  }, []);
  if (identity === null || (identity.key_id === null && !identity.is_admin)) return null;
  const leave = () =>
    signOut().then(
      () => void auth.leave(),
      () => toast("Signing out failed: the server is unreachable."),
    );
  return (
    <div class="panel-section">
      {identity.is_admin && (
        <button type="button" class="button" onClick={() => togglePanel("administration")}>
          Administration
        </button>
      )}
      {identity.key_id !== null && (
        <>
          <p class="hint">Signed in as {signedInName(identity)}.</p>
          <button type="button" class="button" onClick={() => void leave()}>
            Sign out
          </button>
        </>
      )}
    </div>
  );
}
