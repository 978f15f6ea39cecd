// Settings that an answer was generated with, as its response repeats them, and how those of two answers differ.

import type { Signal } from "@preact/signals";
import type { JsonObject, WireResponse } from "../api/frames";
import { getResponse } from "../api/rest";
import { truncate } from "../app/format";

export interface AnswerSettings {
  readonly instructions: string;
  readonly temperature: number | null; // null: beam search
  readonly topP: number | null;
  readonly schema: JsonObject | null;
  readonly effort: string | null; // of the reasoning; null: the model's default
}

export function settingsOf({ instructions, temperature, top_p, text, reasoning }: WireResponse): AnswerSettings {
  return {
    instructions: instructions ?? "",
    temperature: temperature ?? null,
    topP: top_p ?? null,
    schema: text?.format.schema ?? null,
    effort: reasoning?.effort ?? null,
  };
}

/** The part of a turn that has its settings. */
interface SettingsOwner {
  readonly responseId: Signal<string | null>;
  readonly settings: Signal<AnswerSettings | null>;
  settingsLoad: Promise<void> | null;
}

/** Load the settings of a stored turn, once. They stay unknown if the server does not have its response. */
export function loadSettings(turn: SettingsOwner): void {
  const id = turn.responseId.value;
  if (turn.settings.value !== null || turn.settingsLoad !== null || id === null) return;
  turn.settingsLoad = getResponse(id).then(
    (response) => {
      turn.settings.value = settingsOf(response);
    },
    () => {
      turn.settingsLoad = null; // the next request tries again
    },
  );
}

const MAX_SHOWN_CHARS = 80;

const DESCRIPTIONS: { readonly [K in keyof AnswerSettings]: (value: AnswerSettings[K]) => string } = {
  instructions: (text) => (text === "" ? "No system prompt" : `System prompt: ${truncate(text, MAX_SHOWN_CHARS)}`),
  temperature: (value) => (value === null ? "Beam search" : `Temperature ${value}`),
  topP: (value) => (value === null ? "" : `Top-p ${value}`), // of beam search, which is named already
  schema: (value) => (value === null ? "No schema" : `Schema ${truncate(JSON.stringify(value), MAX_SHOWN_CHARS)}`),
  effort: (value) => (value === null ? "Default reasoning" : value === "none" ? "No reasoning" : "Reasoning"),
};

/** Describe the settings of an answer that another one does not share. */
export function differingSettings(own: AnswerSettings, other: AnswerSettings): readonly string[] {
  const describe = <K extends keyof AnswerSettings>(key: K) =>
    JSON.stringify(own[key]) === JSON.stringify(other[key]) ? "" : DESCRIPTIONS[key](own[key]);
  const keys = Object.keys(DESCRIPTIONS) as (keyof AnswerSettings)[];
  return keys.map(describe).filter((text) => text !== "");
}
