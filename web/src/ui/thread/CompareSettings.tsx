// The same prompt with other settings: a form for the settings of a second answer, and both answers side by side.

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { truncate } from "../../app/format";
import { parseSchema, sampling, systemPrompt } from "../../app/settings";
import { type AnswerSettings, loadSettings } from "../../chat/answerSettings";
import { compareTexts } from "../../chat/compare";
import type { Message } from "../../chat/tree";
import { useChat } from "../context";
import { focusComposer } from "../navigation";
import { SchemaField, TemperatureSlider } from "../SamplingSettings";
import { AnswerCard, CommonBeginning } from "./AnswerCard";
import "./compare-settings.css";

const EFFORTS = [
  { label: "Default", reasoning: undefined },
  { label: "On", reasoning: { effort: "medium" } },
  { label: "Off", reasoning: { effort: "none" } },
] as const;

/** Settings of a second answer to the same message. They start as those of the conversation, and do not change them. */
export function CompareSettingsForm({ message, onClose }: { message: Message; onClose: () => void }) {
  const chat = useChat();
  const form = useRef<HTMLFormElement>(null);
  const [instructions, temperature] = [useSignal(systemPrompt.peek()), useSignal(sampling.peek().temperature)];
  const [schema, effort] = [useSignal(sampling.peek().schema), useSignal(EFFORTS[0].label as string)];
  useLayoutEffect(() => form.current?.querySelector("textarea")?.focus(), []);
  const close = () => {
    onClose();
    focusComposer(); // otherwise the focus is lost with the form
  };
  const generate = () => {
    close();
    chat.compareSettings(
      message,
      { temperature: temperature.value, schema: schema.value },
      { instructions: instructions.value, reasoning: EFFORTS.find(({ label }) => label === effort.value)?.reasoning },
    );
  };
  return (
    <form
      class="compare-form"
      aria-label="Compare settings"
      ref={form}
      onSubmit={(event) => {
        event.preventDefault();
        generate();
      }}
      onKeyDown={(event) => {
        if (event.key !== "Escape" || event.isComposing) return;
        event.stopPropagation();
        close();
      }}
    >
      <p class="hint">A second answer to the same message, next to this one. The conversation keeps its settings.</p>
      <label class="field">
        <span class="field-label">System prompt</span>
        <textarea
          rows={3}
          dir="auto"
          placeholder="none"
          value={instructions.value}
          onInput={(event) => (instructions.value = event.currentTarget.value)}
        />
      </label>
      <TemperatureSlider value={temperature.value} onValue={(value) => (temperature.value = value)} />
      <SchemaField schema={schema.value} onSchema={(text) => (schema.value = text)} />
      <fieldset class="field">
        <legend>Reasoning</legend>
        <div class="segments">
          {EFFORTS.map(({ label }) => (
            <button
              key={label}
              type="button"
              aria-pressed={effort.value === label}
              onClick={() => (effort.value = label)}
            >
              {label}
            </button>
          ))}
        </div>
      </fieldset>
      <div class="editor-foot">
        <span class="spacer" />
        <button type="button" class="button" onClick={close}>
          Cancel
        </button>
        <button
          type="submit"
          class="button button-main"
          disabled={chat.live.value !== null || parseSchema({ schema: schema.value }).error !== null}
        >
          Generate
        </button>
      </div>
    </form>
  );
}

/** Answers of several requests to one message side by side: the settings and the words in which they differ. */
export function ComparedAnswers({ answers, chosen }: { answers: readonly Message[]; chosen: Message }) {
  const chat = useChat();
  const thread = chat.thread.value;
  const marks = useSignal(true);
  const turns = answers.map((message) => thread.turnOf(message));
  useEffect(() => {
    for (const turn of turns) if (turn && !turn.live) loadSettings(turn);
  }, [answers]);
  const ended = turns.every((turn) => !turn?.live);
  const comparison = ended && marks.value ? compareTexts(answers.map(({ text }) => text.value)) : null;
  return (
    <section class="candidates compared-answers" aria-label="Answers with different settings, pick one">
      <header class="candidates-head">
        <span class="candidates-title">{answers.length} answers to one message</span>
        <span class="candidates-tools">
          <button
            type="button"
            class="button"
            aria-pressed={marks.value}
            disabled={!ended}
            onClick={() => (marks.value = !marks.value)}
          >
            Differences
          </button>
          <button type="button" class="button" disabled={!ended} onClick={() => (thread.compared.value = null)}>
            Show one
          </button>
        </span>
      </header>
      {comparison && <CommonBeginning text={comparison.common} />}
      <div class="candidates-scroll" tabIndex={0} role="group" aria-label="Answers">
        {answers.map((message, place) => (
          <AnswerCard
            key={message.key}
            message={message}
            turn={turns[place]}
            number={place + 1}
            place={place}
            current={message === chosen}
            parts={comparison?.rests[place] ?? null}
            note={
              <SettingsNote
                own={turns[place]?.settings.value ?? null}
                other={turns[1 - place]?.settings.value ?? null}
              />
            }
          />
        ))}
      </div>
    </section>
  );
}

function SettingsNote({ own, other }: { own: AnswerSettings | null; other: AnswerSettings | null }) {
  if (!own || !other) return <p class="card-settings hint">Its settings are not known.</p>;
  const differing = differingSettings(own, other);
  if (differing.length === 0) return <p class="card-settings hint">The same settings</p>;
  return (
    <ul class="card-settings" aria-label="Settings that differ">
      {differing.map((text) => (
        <li key={text}>{text}</li>
      ))}
    </ul>
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
