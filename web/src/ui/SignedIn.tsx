// Whose chats these are, where the server has keys; and the way out.
import { useEffect, useState } from "preact/hooks";
import { type Identity, signOut, getIdentity } from "../wire/session";
import { toast } from "../state/toast";

export function SignedInSection() {
  const [identity, setIdentity] = useState<Identity | null>(null);
  useEffect(() => {
    getIdentity().then(setIdentity, () => {});
  }, []);
  if (identity === null || identity.key_id === null) return null;
  const leave = () => signOut().then(() => location.reload(), () => toast("Signing out failed: the server does not answer."));
  return (
    <div class="panel-starts">
      <p class="hint">Signed in as {identity.user ? `${identity.tenant}/${identity.user}` : identity.tenant}.</p>
      <button type="button" class="button" onClick={() => void leave()}>Sign out</button>
    </div>
  );
}
