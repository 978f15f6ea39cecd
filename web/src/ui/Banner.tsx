// Banner above the thread: sign-in form, lost connection, loading or failed model.

import { signal, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { useChat } from "./context";

const online = signal(navigator.onLine);
addEventListener("online", () => (online.value = true));
addEventListener("offline", () => (online.value = false));

export function Banner() {
  const chat = useChat();
  const link = chat.socket.state.value;
  if (chat.conversations.state.value === "locked") return <SignInForm />;
  if (link === "refused") {
    return (
      <div class="banner" role="alert">
        The server refused this page.
        <button type="button" class="button" onClick={() => location.reload()}>
          Reload
        </button>
      </div>
    );
  }
  if (link === "lost") {
    return (
      <div class="banner" role="alert">
        {online.value ? "The connection was lost." : "You are offline."} Your conversation is stored; the page
        reconnects automatically.
        <button type="button" class="button" onClick={() => chat.socket.retryNow()}>
          Try now
        </button>
      </div>
    );
  }
  return <LoadingBanner />;
}

const WARM_UP_PROGRESS = 0.9; // from here on the server reports no progress: kernels are compiled

/** Seconds since the banner appeared. */
function ElapsedTime() {
  const seconds = useSignal(0);
  useEffect(() => {
    const started = performance.now();
    const timer = setInterval(() => (seconds.value = Math.floor((performance.now() - started) / 1000)), 1000);
    return () => clearInterval(timer);
  }, []);
  return seconds.value < 3 ? null : <span class="hint">{seconds.value} s</span>;
}

function LoadingBanner() {
  const state = useChat().readiness.status.value;
  if (state.phase === "loading") {
    const isKnown = state.progress > 0 && state.progress < WARM_UP_PROGRESS;
    return (
      <div class="banner banner-info" role="status">
        <label>
          Loading the model <progress {...(isKnown ? { value: state.progress } : {})} max={1} />
        </label>
        <span class="hint">{state.detail}</span>
        <ElapsedTime />
      </div>
    );
  }
  if (state.phase === "unavailable") {
    return (
      <div class="banner" role="alert">
        <span>The model is not running. The conversation is stored; answers continue when the model is back.</span>
        <span class="hint">{state.detail}</span>
      </div>
    );
  }
  return null;
}

/** Why a signed-in user has to sign in again, by error code. */
const LOCK_REASONS: Readonly<Record<string, string>> = {
  api_key_revoked: "Your API key is no longer valid: it was revoked.",
  session_expired: "Your session has ended.",
};

function SignInForm() {
  const chat = useChat();
  const why = LOCK_REASONS[chat.conversations.lockCode.value];
  const input = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => input.current?.focus(), []);
  return (
    <form
      class="banner banner-info sign-in"
      onSubmit={(event) => {
        event.preventDefault();
        const key = new FormData(event.currentTarget).get("key");
        if (typeof key === "string" && key.trim()) void chat.signIn(key.trim());
      }}
    >
      {why && <span role="alert">{why}</span>}
      <label>
        <span>This server requires an API key</span>
        <input ref={input} class="text-input" name="key" type="password" autocomplete="off" />
      </label>
      <button type="submit" class="button button-main">
        Sign in
      </button>
    </form>
  );
}
