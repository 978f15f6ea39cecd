// The API key, where the server wants one. It lives as long as the tab and never reaches localStorage.
import { signal } from "@preact/signals";

const NAME = "chatcache.key";

export const apiKey = signal<string>(read());

export function setApiKey(key: string): void {
  apiKey.value = key;
  try {
    sessionStorage.setItem(NAME, key);
  } catch {
    // storage is off: the key lasts until the next reload
  }
}

/** A browser's WebSocket cannot send headers; the key rides along as a subprotocol. */
export function protocols(): string[] {
  return apiKey.value ? ["chatcache.v1", `openai-insecure-api-key.${apiKey.value}`] : ["chatcache.v1"];
}

function read(): string {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}
