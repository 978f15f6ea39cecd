// Browser services that may be unavailable: storage (values as JSON) and the clipboard.

const PREFIX = "chatcache.";
const PERSONAL = ["drafts", "owner", "pinned", "toolRuns"]; // values of the signed-in user
let isCleared = false;

/** Read a stored value; the fallback if there is none, if storage is disabled, or if the value is not JSON. */
export function load<T>(name: string, fallback: T, storage: "local" | "session" = "local"): T {
  try {
    const text = storageOf(storage).getItem(PREFIX + name);
    return text === null ? fallback : (JSON.parse(text) as T);
  } catch {
    return fallback;
  }
}

/** Store a value. Without storage it is lost when the tab closes. */
export function save(name: string, value: unknown, storage: "local" | "session" = "local"): void {
  if (isCleared && PERSONAL.includes(name)) return;
  try {
    storageOf(storage).setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is disabled or full
  }
}

/** Remove the stored values of the signed-in user. This page stores no more of them: the caller reloads it. */
export function clearPersonalData(): void {
  isCleared = true;
  try {
    for (const name of PERSONAL) localStorage.removeItem(PREFIX + name);
  } catch {
    // storage is disabled
  }
}

/** Call `run` when another tab changes a stored value. */
export function onStoredElsewhere(name: string, run: () => void): void {
  addEventListener("storage", (event) => event.key === PREFIX + name && run());
}

/** Let the page open without a network. Browsers offer that over https and on localhost only. */
export function registerServiceWorker(): void {
  if (!("serviceWorker" in navigator)) return;
  addEventListener("load", () => void navigator.serviceWorker.register("./sw.js").catch(() => {}));
}

// Reading the property throws where storage is disabled, so this is called inside `try`.
function storageOf(name: "local" | "session"): Storage {
  return name === "local" ? localStorage : sessionStorage;
}

/** Copy to the clipboard; false if the browser refuses, e.g. over plain http from another host. */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "sr-only";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
