// Settings of answers that few need: bias and choice of tokens, endings, and details of the beam search.

import { useSignal } from "@preact/signals";
import { detokenize, tokenize } from "../api/rest";
import {
  checkAllowedTokens,
  checkBadWords,
  checkStopTokens,
  groupsError,
  MAX_BIAS,
  MAX_BIASED_TOKENS,
  MAX_DIVERSITY_PENALTY,
  MAX_LENGTH_PENALTY,
  MAX_TOKEN_ID,
  minTokensError,
  type TokenBias,
  withBias,
} from "../app/rareSampling";
import { MAX_N, type Sampling, sampling, setSampling } from "../app/settings";
import { isTooLongToStore } from "../conversations/metadata";
import { Close } from "./icons";
import { NumberField, Slider } from "./SamplingSettings";

export function RareSettings() {
  const settings = sampling.value;
  return (
    <details class="more-settings">
      <summary>Rare parameters</summary>
      <TokenBiases settings={settings} />
      <TextField
        label="Texts that answers must not contain, one per line"
        value={settings.badWords}
        error={checkBadWords(settings).error}
        onValue={(badWords) => setSampling({ badWords })}
      />
      <TextField
        label="Allowed tokens, by id"
        value={settings.allowedTokens}
        placeholder="all tokens"
        error={checkAllowedTokens(settings).error}
        onValue={(allowedTokens) => setSampling({ allowedTokens })}
      />
      <TextField
        label="Tokens that end an answer, by id"
        value={settings.stopTokens}
        error={checkStopTokens(settings).error}
        onValue={(stopTokens) => setSampling({ stopTokens })}
      />
      <NumberField
        label="Min output tokens"
        placeholder="none"
        max={MAX_TOKEN_ID}
        value={settings.minTokens || null}
        onValue={(value) => setSampling({ minTokens: value ?? 0 })}
      />
      <Problem error={minTokensError(settings, settings.maxTokens)} />
      <NumberField
        label="Max reasoning tokens"
        placeholder="no limit"
        max={MAX_TOKEN_ID}
        value={settings.reasoningTokens || null}
        onValue={(value) => setSampling({ reasoningTokens: value ?? 0 })}
      />
      <label class="check">
        <input
          type="checkbox"
          checked={settings.ignoreEos}
          onChange={(event) => setSampling({ ignoreEos: event.currentTarget.checked })}
        />
        Go on after the end that the model chooses
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked={settings.keepsStopText}
          onChange={(event) => setSampling({ keepsStopText: event.currentTarget.checked })}
        />
        Keep the text that ended an answer
      </label>
      {settings.search === "beam" && <BeamDetails settings={settings} />}
      {isTooLongToStore(settings) && (
        <p class="hint" role="status">
          These settings are too long to be stored with the conversation: they are used until the page is reloaded.
        </p>
      )}
    </details>
  );
}

const STOPPING = [
  { name: "estimate", label: "Estimate" },
  { name: "first", label: "At once" },
  { name: "never", label: "Never" },
] as const;

function BeamDetails({ settings }: { settings: Sampling }) {
  return (
    <>
      <Slider
        label="Length penalty"
        min={-MAX_LENGTH_PENALTY}
        max={MAX_LENGTH_PENALTY}
        step={0.1}
        value={settings.lengthPenalty}
        onValue={(lengthPenalty) => setSampling({ lengthPenalty })}
      />
      <fieldset class="field">
        <legend>End the search early</legend>
        <div class="segments">
          {STOPPING.map(({ name, label }) => (
            <button
              key={name}
              type="button"
              aria-pressed={settings.earlyStopping === name}
              onClick={() => setSampling({ earlyStopping: name })}
            >
              {label}
            </button>
          ))}
        </div>
        <p class="hint">When enough texts have ended: if no better one is expected, at once, or never.</p>
      </fieldset>
      <Slider
        label="Beam groups"
        min={1}
        max={MAX_N}
        step={1}
        value={settings.beamGroups}
        onValue={(beamGroups) => setSampling({ beamGroups })}
      />
      <Problem error={groupsError(settings, settings.n)} />
      {settings.beamGroups > 1 && (
        <Slider
          label="Diversity penalty between groups"
          min={0}
          max={MAX_DIVERSITY_PENALTY}
          step={0.5}
          value={settings.diversityPenalty}
          onValue={(diversityPenalty) => setSampling({ diversityPenalty })}
        />
      )}
    </>
  );
}

interface TextProps {
  readonly label: string;
  readonly value: string;
  readonly placeholder?: string;
  readonly error: string | null;
  readonly onValue: (value: string) => void;
}

function TextField({ label, value, placeholder = "none", error, onValue }: TextProps) {
  return (
    <label class="field">
      <span class="field-label">{label}</span>
      <textarea
        rows={2}
        dir="auto"
        spellcheck={false}
        placeholder={placeholder}
        aria-invalid={error !== null}
        value={value}
        onInput={(event) => onValue(event.currentTarget.value)}
      />
      <Problem error={error} />
    </label>
  );
}

function Problem({ error }: { error: string | null }) {
  return error === null ? null : (
    <span class="ending-error" role="alert">
      {error}
    </span>
  );
}

/** Read the tokens of a text, or the one of an id such as #42. Raises: Error with a message for the user. */
async function findTokens(written: string): Promise<readonly Omit<TokenBias, "bias">[]> {
  const id = /^\s*#(\d+)\s*$/.exec(written)?.[1];
  if (id !== undefined) {
    if (Number(id) > MAX_TOKEN_ID) throw new Error(`A token id is a whole number from 0 to ${MAX_TOKEN_ID}.`);
    return [{ id: Number(id), text: (await detokenize([Number(id)])).prompt }];
  }
  const { tokens, token_strs } = await tokenize(written);
  return tokens.map((token, index) => ({ id: token, text: token_strs[index]! }));
}

function TokenBiases({ settings }: { settings: Sampling }) {
  const token = useSignal("");
  const bias = useSignal("");
  const error = useSignal<string | null>(null);
  const add = async () => {
    const number = Number(bias.value);
    if (token.value === "") error.value = "Write a text, or # and the id of a token.";
    else if (bias.value.trim() === "" || !(number >= -MAX_BIAS && number <= MAX_BIAS))
      error.value = `A bias is a number from -${MAX_BIAS} to ${MAX_BIAS}.`;
    else {
      try {
        const found = await findTokens(token.value);
        const next = withBias(
          sampling.value.tokenBias,
          found.map((each) => ({ ...each, bias: number })),
        );
        error.value = next.length > MAX_BIASED_TOKENS ? `At most ${MAX_BIASED_TOKENS} tokens have a bias.` : null;
        if (error.value !== null) return;
        setSampling({ tokenBias: next });
        token.value = bias.value = "";
      } catch (failure) {
        error.value = (failure as Error).message;
      }
    }
  };
  const remove = (id: number) => setSampling({ tokenBias: settings.tokenBias.filter((each) => each.id !== id) });
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    void add();
  };
  return (
    <fieldset class="field">
      <legend>Token bias</legend>
      {settings.tokenBias.length > 0 && (
        <ul class="token-biases">
          {settings.tokenBias.map(({ id, text, bias: number }) => (
            <li key={id}>
              <code>{JSON.stringify(text)}</code>
              <span class="hint">#{id}</span>
              <b>{number > 0 ? `+${number}` : number}</b>
              <button
                type="button"
                class="tool"
                aria-label={`Remove the bias of ${text || `#${id}`}`}
                onClick={() => remove(id)}
              >
                <Close />
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="token-bias-form">
        <input
          type="text"
          aria-label="Token"
          placeholder="Text or #id"
          autocomplete="off"
          maxLength={200}
          value={token.value}
          onInput={(event) => (token.value = event.currentTarget.value)}
          onKeyDown={onKeyDown}
        />
        <input
          type="text"
          inputMode="text"
          aria-label="Bias"
          placeholder={`-${MAX_BIAS} to ${MAX_BIAS}`}
          autocomplete="off"
          value={bias.value}
          onInput={(event) => (bias.value = event.currentTarget.value)}
          onKeyDown={onKeyDown}
        />
        <button type="button" class="button" onClick={() => void add()}>
          Add
        </button>
      </div>
      <Problem error={error.value} />
      <p class="hint">
        Added to the score of every token of the text. A space before a word counts: within a sentence, most begin with
        one.
      </p>
    </fieldset>
  );
}
