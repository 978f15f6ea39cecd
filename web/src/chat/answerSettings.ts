// Settings that an answer was generated with, as its response repeats them.

import type { Signal } from "@preact/signals";
import type { JsonObject, WireResponse } from "../api/frames";
import { getResponse } from "../api/rest";

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
