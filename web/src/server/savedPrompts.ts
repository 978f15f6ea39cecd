// Saved prompts of the server: texts to start a message with, which all users of a tenant share.

import { call } from "../api/rest";

export interface SavedPrompt {
  readonly name: string;
  readonly text: string;
  readonly description: string;
  readonly variables: readonly string[]; // names in the text, each once
}

export type PromptFields = Pick<SavedPrompt, "name" | "text" | "description">;

export async function listPrompts(): Promise<readonly SavedPrompt[]> {
  return (await call<{ data: readonly SavedPrompt[] }>("GET", "v1/prompts")).data;
}

export function createPrompt(fields: PromptFields): Promise<SavedPrompt> {
  return call("POST", "v1/prompts", fields);
}

/** Change the prompt that is stored under `name`; another name in `fields` renames it. */
export function updatePrompt(name: string, fields: PromptFields): Promise<SavedPrompt> {
  return call("POST", promptPath(name), fields);
}

export function deletePrompt(name: string): Promise<unknown> {
  return call("DELETE", promptPath(name));
}

function promptPath(name: string): string {
  return `v1/prompts/${encodeURIComponent(name)}`;
}

const VARIABLE = /\{\{[ \t]*([^{}\s](?:[^{}\n]{0,62}[^{}\s])?)[ \t]*\}\}/g; // as the server finds them

/** Replace the variables that have a value; a value is inserted as it is. */
export function fillVariables(text: string, values: ReadonlyMap<string, string>): string {
  return text.replace(VARIABLE, (whole, name: string) => values.get(name) ?? whole);
}
