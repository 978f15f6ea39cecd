// Candidates of one prompt side by side, each in a card: all of them, two, or one at full width; their differences.

import { useSignal } from "@preact/signals";
import { scoreTokens } from "../../api/rest";
import { toast } from "../../app/notifications";
import { compareTexts, meanProbability } from "../../chat/compare";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { useChat } from "../context";
import { Again, Close, Columns, Widen } from "../icons";
import { AnswerCard, CommonBeginning } from "./AnswerCard";
import { AnswerStats, CacheStrip, UnsavedBadge } from "./AnswerStats";

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
      {comparison && <CommonBeginning text={comparison.common} />}
      <div class="candidates-scroll" tabIndex={0} role="group" aria-label="Candidates">
        {shown.map((message, place) => (
          <AnswerCard
            key={message.key}
            message={message}
            turn={turn}
            number={turn.candidates.indexOf(message) + 1}
            place={place}
            current={message === chosen}
            parts={comparison?.rests[place] ?? null}
            likelihood={likelihoods.value?.get(message) ?? null}
            isWide={message === wide.value}
            tools={
              <CardTools
                message={message}
                turn={turn}
                isPaired={pair.value.includes(message)}
                isWide={message === wide.value}
                onWiden={() => (wide.value = message === wide.value ? null : message)}
                onPair={() => addToPair(message)}
              />
            }
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

interface ToolsProps {
  readonly message: Message;
  readonly turn: Turn;
  readonly isPaired: boolean;
  readonly isWide: boolean;
  readonly onWiden: () => void;
  readonly onPair: () => void;
}

function CardTools({ message, turn, isPaired, isWide, onWiden, onPair }: ToolsProps) {
  const chat = useChat();
  const number = turn.candidates.indexOf(message) + 1;
  return (
    <>
      {!turn.live && turn.candidates.length > 2 && (
        <button
          type="button"
          class="tool card-tool"
          aria-label={`Compare answer ${number}`}
          aria-pressed={isPaired}
          title="Compare with another answer: choose two"
          onClick={onPair}
        >
          <Columns />
        </button>
      )}
      {!turn.live && (
        <button
          type="button"
          class="tool card-tool"
          aria-label={`Widen answer ${number}`}
          aria-pressed={isWide}
          title={isWide ? "Show all answers" : "Show this answer alone"}
          onClick={onWiden}
        >
          <Widen />
        </button>
      )}
      {turn.canDrop(message) && (
        <button
          type="button"
          class="tool card-drop"
          aria-label={`Drop answer ${number}`}
          title="Stop this answer and free its KV pages (Alt+Del)"
          onClick={() => chat.drop(message)}
        >
          <Close />
        </button>
      )}
    </>
  );
}
