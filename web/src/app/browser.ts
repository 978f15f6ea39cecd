// Browser services that may be unavailable: storage (values as JSON) and the clipboard.

const PREFIX = "chatcache.";

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
  try {
    storageOf(storage).setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is disabled or full
  }
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
