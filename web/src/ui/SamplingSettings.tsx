// How answers are generated: search, number of answers, and the parameters of sampling.

import { useSignal } from "@preact/signals";
import {
  MAX_N,
  MAX_REPLY_START,
  MAX_SCHEMA_CHARS,
  MAX_STOP_CHARS,
  MAX_STOPS,
  MAX_TOP_K,
  parseSchema,
  type Sampling,
  sampling,
  setSampling,
  stopTexts,
} from "../app/settings";

const MAX_TOKENS = 2 ** 31 - 1;

export function SamplingSettings() {
  const settings = sampling.value;
  const beams = settings.search === "beam";
  return (
    <>
      <fieldset class="field">
        <legend>Search</legend>
        <div class="segments">
          <button type="button" aria-pressed={!beams} onClick={() => setSampling({ search: "sample" })}>
            Sample
          </button>
          <button
            type="button"
            aria-pressed={beams}
            onClick={() => setSampling({ search: "beam", n: Math.max(2, settings.n) })}
          >
            Beam search
          </button>
        </div>
        <p class="hint">
          {beams
            ? "Keeps the most likely texts at each step and returns the best."
            : "Draws each token at random; likely ones come more often."}
        </p>
      </fieldset>
      <Slider
        label={beams ? "Beams" : "Answers"}
        min={beams ? 2 : 1}
        max={MAX_N}
        step={1}
        value={settings.n}
        onValue={(n) => setSampling({ n })}
      />
      {!beams && (
        <>
          <TemperatureSlider value={settings.temperature} onValue={(temperature) => setSampling({ temperature })} />
          <Slider
            label="Top-p"
            min={0.05}
            max={1}
            step={0.05}
            value={settings.topP}
            onValue={(topP) => setSampling({ topP })}
          />
        </>
      )}
      <NumberField
        label="Max output tokens"
        placeholder="limited by the context"
        max={MAX_TOKENS}
        value={settings.maxTokens || null}
        onValue={(value) => setSampling({ maxTokens: value ?? 0 })}
      />
      {!beams && (
        <NumberField
          label="Seed"
          placeholder="random"
          min={0}
          max={Number.MAX_SAFE_INTEGER}
          value={settings.seed}
          onValue={(seed) => setSampling({ seed })}
        />
      )}
      <label class="field">
        <span class="field-label">Answers begin with</span>
        <textarea
          rows={2}
          maxLength={MAX_REPLY_START}
          dir="auto"
          placeholder="nothing"
          value={settings.replyStart}
          onInput={(event) => setSampling({ replyStart: event.currentTarget.value })}
        />
      </label>
      <MoreSettings settings={settings} />
    </>
  );
}

const PENALTIES = [
  { name: "presencePenalty", label: "Presence penalty", min: -2, max: 2 },
  { name: "frequencyPenalty", label: "Frequency penalty", min: -2, max: 2 },
  { name: "repetitionPenalty", label: "Repetition penalty", min: 0.5, max: 2 },
] as const;

function MoreSettings({ settings }: { settings: Sampling }) {
  return (
    <details class="more-settings">
      <summary>More parameters</summary>
      {settings.search === "sample" && (
        <>
          <NumberField
            label="Top-k"
            placeholder="all tokens"
            max={MAX_TOP_K}
            value={settings.topK || null}
            onValue={(value) => setSampling({ topK: value ?? 0 })}
          />
          <Slider
            label="Min-p"
            min={0}
            max={1}
            step={0.01}
            value={settings.minP}
            onValue={(minP) => setSampling({ minP })}
          />
        </>
      )}
      {PENALTIES.map(({ name, label, min, max }) => (
        <Slider
          key={name}
          label={label}
          min={min}
          max={max}
          step={0.05}
          value={settings[name]}
          onValue={(value) => setSampling({ [name]: value })}
        />
      ))}
      <label class="field">
        <span class="field-label">Texts that end an answer, one per line</span>
        <textarea
          rows={2}
          maxLength={MAX_STOP_CHARS}
          dir="auto"
          placeholder="none"
          value={settings.stop}
          onInput={(event) => setSampling({ stop: event.currentTarget.value })}
        />
      </label>
      {stopTexts(settings).length > MAX_STOPS && (
        <p class="ending-error" role="alert">
          Only the first {MAX_STOPS} of these texts are used.
        </p>
      )}
      <SchemaField schema={settings.schema} onSchema={(schema) => setSampling({ schema })} />
    </details>
  );
}

/** The schema is checked while it is written. One that the server does not support is the error of the next answer. */
export function SchemaField({ schema, onSchema }: { schema: string; onSchema: (schema: string) => void }) {
  const { value, error } = parseSchema({ schema });
  return (
    <label class="field">
      <span class="field-label">JSON schema of answers</span>
      <textarea
        rows={4}
        class="schema-text"
        maxLength={MAX_SCHEMA_CHARS}
        spellcheck={false}
        placeholder="none"
        aria-invalid={error !== null}
        value={schema}
        onInput={(event) => onSchema(event.currentTarget.value)}
      />
      {value !== null && <span class="hint">Answers match this schema.</span>}
      {error !== null && (
        <span class="ending-error" role="alert">
          {error.endsWith(".") ? error : `${error}.`} It is not used.
        </span>
      )}
    </label>
  );
}

interface SliderProps {
  readonly label: string;
  readonly min: number;
  readonly max: number;
  readonly step: number;
  readonly value: number;
  readonly onValue: (value: number) => void;
}

export function TemperatureSlider(props: Pick<SliderProps, "value" | "onValue">) {
  return <Slider label="Temperature" min={0} max={2} step={0.05} {...props} />;
}

export function Slider({ label, min, max, step, value, onValue }: SliderProps) {
  return (
    <label class="field slider">
      <span class="field-label">
        {label} <output>{step < 1 ? value.toFixed(2) : value}</output>
      </span>
      <input
        type="range"
        min={min}
        max={max}
        step={step}
        value={value}
        onInput={(event) => onValue(event.currentTarget.valueAsNumber)}
      />
    </label>
  );
}

interface NumberProps {
  readonly label: string;
  readonly placeholder: string;
  readonly min?: number;
  readonly max: number;
  readonly value: number | null;
  readonly onValue: (value: number | null) => void;
}

/** A whole number, or nothing. Another text is named as an error, and changes nothing. */
export function NumberField({ label, placeholder, min = 1, max, value, onValue }: NumberProps) {
  const wrong = useSignal(false);
  const read = (text: string) => {
    const number = text === "" ? null : Number(text);
    wrong.value = number !== null && !(/^\d+$/.test(text) && number >= min && number <= max);
    if (!wrong.value) onValue(number);
  };
  return (
    <label class="field">
      <span class="field-label">{label}</span>
      <input
        type="text"
        inputMode="numeric"
        placeholder={placeholder}
        value={value ?? ""}
        aria-invalid={wrong.value}
        onChange={(event) => read(event.currentTarget.value.trim())}
      />
      {wrong.value && (
        <span class="ending-error" role="alert">
          {label} is a whole number from {min} to {max.toLocaleString("en")}, or empty.
        </span>
      )}
    </label>
  );
}
