// How answers are drawn and how the assistant behaves.
import { useEffect, useRef } from "preact/hooks";
import { announce } from "../state/announcer";
import {
  autoTitle, DEFAULT_SAMPLING, defaultSampling, defaultSystem, prefillWhileTyping, makeDefaults, MAX_N, shouldAutoTitle, sameSampling, sampling,
  setSampling, showStats, systemPrompt, clickForAlternatives,
} from "../state/settings";
import { useChat } from "./context";
import { Close } from "./icons";
import { panel } from "./panels";
import { SystemPrompts } from "./Prompts";
import { SignedInSection } from "./SignedIn";

export function Settings() {
  const chat = useChat();
  const root = useRef<HTMLElement>(null);
  useEffect(() => root.current?.querySelector<HTMLElement>("button")?.focus(), []);
  const settings = sampling.value;
  const beams = settings.search === "beam";
  return (
    <aside class="panel" aria-label="Settings" ref={root}>
      <header class="panel-head">
        <h2>Settings</h2>
        <button type="button" class="tool" aria-label="Close settings" onClick={() => (panel.value = null)}><Close /></button>
      </header>
      <SystemPrompts />
      <fieldset class="field">
        <legend>Search</legend>
        <div class="segments">
          <button type="button" aria-pressed={!beams} onClick={() => setSampling({ search: "sample" })}>Sample</button>
          <button type="button" aria-pressed={beams} onClick={() => setSampling({ search: "beam", n: Math.max(2, settings.n) })}>
            Beam search
          </button>
        </div>
        <p class="hint">{beams ? "Keeps the most likely texts at every step and shows the best." : "Draws every token from what is likely."}</p>
      </fieldset>
      <Slider label={beams ? "Beams" : "Answers"} min={beams ? 2 : 1} max={MAX_N} step={1} value={settings.n} onValue={(n) => setSampling({ n })} />
      {!beams && (
        <>
          <Slider label="Temperature" min={0} max={2} step={0.05} value={settings.temperature} onValue={(temperature) => setSampling({ temperature })} />
          <Slider label="Top-p" min={0.05} max={1} step={0.05} value={settings.topP} onValue={(topP) => setSampling({ topP })} />
        </>
      )}
      <NumberField label="Longest answer, tokens" placeholder="as many as fit" value={settings.maxTokens || null} onValue={(value) => setSampling({ maxTokens: value ?? 0 })} />
      {!beams && <NumberField label="Seed" placeholder="a new one each time" value={settings.seed} onValue={(seed) => setSampling({ seed })} />}
      <DefaultsSection />
      <h3 class="panel-part">This browser</h3>
      <label class="check">
        <input type="checkbox" checked={shouldAutoTitle(chat.session.value?.model)} onChange={(event) => (autoTitle.value = event.currentTarget.checked)} />
        The model names new chats
      </label>
      <label class="check">
        <input type="checkbox" checked={showStats.value} onChange={(event) => (showStats.value = event.currentTarget.checked)} />
        Figures below each answer
      </label>
      <label class="check">
        <input type="checkbox" checked={prefillWhileTyping.value} onChange={(event) => (prefillWhileTyping.value = event.currentTarget.checked)} />
        Draft-ahead: the server reads while I type
      </label>
      <label class="check">
        <input type="checkbox" checked={clickForAlternatives.value} onChange={(event) => (clickForAlternatives.value = event.currentTarget.checked)} />
        A click on a word shows its alternatives
      </label>
      <SignedInSection />
    </aside>
  );
}

/** These settings belong to the conversation; new ones start with what is kept here. */
function DefaultsSection() {
  const plain = sameSampling(sampling.value, DEFAULT_SAMPLING);
  const same = sameSampling(sampling.value, defaultSampling.value) && systemPrompt.value === defaultSystem.value;
  const keep = () => {
    makeDefaults();
    announce("New chats start like this one.");
  };
  return (
    <div class="panel-starts">
      <p class="hint">{same ? "New chats start with these settings." : "These settings are this conversation's own."}</p>
      <button type="button" class="button" disabled={same} onClick={keep}>Start new chats like this</button>
      <button type="button" class="button" disabled={plain} onClick={() => (sampling.value = DEFAULT_SAMPLING)}>Back to the usual sampling</button>
    </div>
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

function Slider({ label, min, max, step, value, onValue }: SliderProps) {
  return (
    <label class="field slider">
      <span class="field-label">{label} <output>{step < 1 ? value.toFixed(2) : value}</output></span>
      <input type="range" min={min} max={max} step={step} value={value} onInput={(event) => onValue(event.currentTarget.valueAsNumber)} />
    </label>
  );
}

interface NumberProps {
  readonly label: string;
  readonly placeholder: string;
  readonly value: number | null;
  readonly onValue: (value: number | null) => void;
}

function NumberField({ label, placeholder, value, onValue }: NumberProps) {
  const read = (text: string) => onValue(/^\d+$/.test(text.trim()) ? Number(text) : null);
  return (
    <label class="field">
      <span class="field-label">{label}</span>
      <input type="text" inputMode="numeric" placeholder={placeholder} value={value ?? ""} onChange={(event) => read(event.currentTarget.value)} />
    </label>
  );
}
