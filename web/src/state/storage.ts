// What this browser keeps, as JSON. Without storage a choice lasts as long as the tab.

const PREFIX = "chatcache.";

export function load<T>(name: string, fallback: T): T {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : (JSON.parse(text) as T);
  } catch {
    return fallback; // storage is off, or was written by something else
  }
}

export function save(name: string, value: unknown): void {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is off
  }
}
