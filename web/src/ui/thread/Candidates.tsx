// Candidates of one prompt side by side, each in a card: all of them, two, or one at full width; their differences.

import { useComputed, useSignal } from "@preact/signals";
import { scoreTokens } from "../../api/rest";
import { formatPercent, plural } from "../../app/format";
import { toast } from "../../app/notifications";
import { compareTexts, meanProbability, type TextPart } from "../../chat/compare";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { useChat } from "../context";
import { Again, Close, Columns, Widen } from "../icons";
import { AnswerStats, CacheStrip, DroppedNote, UnsavedBadge } from "./AnswerStats";
import { Ending, Markdown, Pending, Reasoning, STATUS_LABELS } from "./MessageParts";
import { SchemaStatus } from "./SchemaStatus";

export function Candidates({ turn, chosen }: { turn: Turn; chosen: Message }) {
  const chat = useChat();
  const usage = turn.usage.value;
  const count = turn.candidates.length;
  const kind = turn.beams ? "beams" : "answers";
  const [compares, wide] = [useSignal(false), useSignal<Message | null>(null)];
  const pair = useSignal<readonly Message[]>([]);
  const likelihoods = useSignal<ReadonlyMap<Message, number> | null>(null); // null: in the order of the request
  const isPair = pair.value.length === 2;
  const shown = wide.value
    ? [wide.value]
    : isPair
      ? pair.value
      : turn.candidates.toSorted((a, b) => likelihoodOf(b) - likelihoodOf(a));
  const ended = !turn.live;
  const comparison =
    ended && !wide.value && (compares.value || isPair) ? compareTexts(shown.map(({ text }) => text.value)) : null;

  function likelihoodOf(message: Message): number {
    return likelihoods.value?.get(message) ?? 0;
  }
  const sort = async () => {
    const conversation = chat.thread.value.id.value;
    if (likelihoods.value || conversation === null) {
      likelihoods.value = null;
      return;
    }
    try {
      const stored = turn.candidates.filter((message) => message.id.value !== null && message.text.value !== "");
      const scores = await Promise.all(stored.map(({ id }) => scoreTokens(conversation, id.value!, 0)));
      const means = scores.map((tokens) => meanProbability(tokens.map(({ token }) => token.logprob)));
      likelihoods.value = new Map(stored.map((message, index) => [message, means[index]!]));
    } catch (error) {
      toast((error as Error).message);
    }
  };
  const addToPair = (message: Message) => {
    const others = pair.value.filter((each) => each !== message);
    pair.value = others.length < pair.value.length ? others : [...others.slice(-1), message];
    wide.value = null;
  };
  return (
    <section class="candidates" aria-label={`${count} ${kind}, pick one`}>
      <header class="candidates-head">
        <span class="candidates-title">
          {count} {kind} from one prompt
        </span>
        {ended && (
          <span class="candidates-tools">
            <button
              type="button"
              class="button"
              aria-pressed={comparison !== null}
              disabled={isPair || wide.value !== null}
              onClick={() => (compares.value = !compares.value)}
            >
              Differences
            </button>
            <button
              type="button"
              class="button"
              aria-pressed={likelihoods.value !== null}
              title="Most likely first: the mean probability of the tokens of each answer"
              onClick={() => void sort()}
            >
              Sort by probability
            </button>
            {(isPair || wide.value) && (
              <button
                type="button"
                class="button"
                onClick={() => {
                  pair.value = [];
                  wide.value = null;
                }}
              >
                Show all {count}
              </button>
            )}
          </span>
        )}
        <span class="candidates-prompt">
          {usage && <CacheStrip usage={usage} />}
          {usage && (
            <span class="hint">
              {usage.inputTokens} prompt tokens, shared by all {count}
            </span>
          )}
        </span>
      </header>
      {comparison && comparison.common.trim() !== "" && (
        <details class="candidates-common">
          <summary>All begin with the same {plural(comparison.common.length, "character")}</summary>
          {comparison.common}
        </details>
      )}
      <div class="candidates-scroll" tabIndex={0} role="group" aria-label="Candidates">
        {shown.map((message, place) => (
          <CandidateCard
            key={message.key}
            message={message}
            turn={turn}
            index={turn.candidates.indexOf(message)}
            place={place}
            current={message === chosen}
            parts={comparison?.rests[place] ?? null}
            likelihood={likelihoods.value?.get(message) ?? null}
            isWide={message === wide.value}
            isPaired={pair.value.includes(message)}
            onWiden={() => (wide.value = message === wide.value ? null : message)}
            onPair={() => addToPair(message)}
          />
        ))}
      </div>
      <footer class="answer-foot">
        <div class="tools">
          <button
            type="button"
            class="tool tool-regenerate"
            aria-label="Regenerate all"
            title="Regenerate all"
            disabled={chat.live.value !== null}
            onClick={() => chat.regenerate(chosen)}
          >
            <Again />
          </button>
          <span class="hint">
            Pick one to continue<span class="key-hint">: click it, or Alt+1 … Alt+{count}</span>
          </span>
        </div>
        <UnsavedBadge turn={turn} />
        <AnswerStats turn={turn} strip={false} />
      </footer>
    </section>
  );
}

interface CardProps {
  readonly message: Message;
  readonly turn: Turn;
  readonly index: number;
  readonly place: number; // on screen
  readonly current: boolean;
  readonly parts: readonly TextPart[] | null; // its differences; null: it is shown as usual
  readonly likelihood: number | null;
  readonly isWide: boolean;
  readonly isPaired: boolean;
  readonly onWiden: () => void;
  readonly onPair: () => void;
}

function CandidateCard(props: CardProps) {
  const { message, turn, index, place, current, parts, likelihood, isWide, isPaired } = props;
  const chat = useChat();
  const status = message.status.value;
  const open = status === "waiting" || status === "streaming";
  const isEmpty = useComputed(() => message.text.value === "");
  const dropped = turn.dropped.value.get(message);
  const pick = (event: MouseEvent) => {
    const inside = event.target as HTMLElement;
    if (inside.closest("a, button, pre") || getSelection()?.isCollapsed === false) return;
    chat.pick(message);
  };
  return (
    <div class={`candidate-slot candidate-slot-${place}`}>
      <div class="candidate-stem" aria-hidden="true" />
      <article
        class={`card ${current ? "card-current" : ""} ${dropped ? "card-dropped" : ""} ${isWide ? "card-wide" : ""}`}
        data-status={status}
        aria-label={`Answer ${index + 1}`}
        aria-busy={open}
        onClick={pick}
      >
        <header class="card-head">
          <span class="card-number">{index + 1}</span>
          {likelihood !== null && (
            <span class="card-likelihood" title="Mean probability of its tokens">
              {formatPercent(likelihood)}
            </span>
          )}
          <span class="card-state">{dropped ? "dropped" : STATUS_LABELS[status]}</span>
          {!turn.live && turn.candidates.length > 2 && (
            <button
              type="button"
              class="tool card-tool"
              aria-label={`Compare answer ${index + 1}`}
              aria-pressed={isPaired}
              title="Compare with another answer: choose two"
              onClick={props.onPair}
            >
              <Columns />
            </button>
          )}
          {!turn.live && (
            <button
              type="button"
              class="tool card-tool"
              aria-label={`Widen answer ${index + 1}`}
              aria-pressed={isWide}
              title={isWide ? "Show all answers" : "Show this answer alone"}
              onClick={props.onWiden}
            >
              <Widen />
            </button>
          )}
          {turn.canDrop(message) && (
            <button
              type="button"
              class="tool card-drop"
              aria-label={`Drop answer ${index + 1}`}
              title="Stop this answer and free its KV pages (Alt+Del)"
              onClick={() => chat.drop(message)}
            >
              <Close />
            </button>
          )}
        </header>
        <div class="card-body">
          <Reasoning message={message} turn={turn} />
          {isEmpty.value && open && <Pending turn={turn} />}
          {parts ? <Differences parts={parts} /> : <Markdown message={message} />}
          {dropped ? <DroppedNote receipt={dropped} /> : <Ending message={message} />}
          {!dropped && <SchemaStatus message={message} turn={turn} />}
        </div>
        <button
          type="button"
          class="button card-pick"
          aria-keyshortcuts={`Alt+${index + 1}`}
          onClick={() => chat.pick(message)}
        >
          <span>
            Pick<span class="sr-only"> answer {index + 1}</span>
          </span>
          <kbd aria-hidden="true">Alt {index + 1}</kbd>
        </button>
      </article>
    </div>
  );
}

/** The rest of an answer after the common beginning; what the compared answer does not have is marked. */
function Differences({ parts }: { parts: readonly TextPart[] }) {
  return (
    <p class="differences" dir="auto">
      {parts.length === 0 && <span class="hint">(no further text)</span>}
      {parts.map(({ text, differs }, index) => (differs ? <mark key={index}>{text}</mark> : text))}
    </p>
  );
}
