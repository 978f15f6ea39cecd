// An answer as a sequence of tokens coloured by probability, and the popover with the alternatives at one token. Arrow
// keys move, D goes to the next doubt, Enter opens.

import { useLayoutEffect, useRef } from "preact/hooks";
import type { Alternatives as AlternativesResponse } from "../../api/rest";
import { formatPercent, plural, showWhitespace } from "../../app/format";
import { type Choice, doubtLevel, nextDoubt, rankChoices } from "../../chat/tokenChoices";
import type { TokenInspector, TokenSpan } from "../../chat/tokenInspector";
import { useChat } from "../context";
import { Close, Left, Right } from "../icons";
import { placeNextTo } from "../Menu";
import { focusComposer } from "../navigation";
import "./token-view.css";

export function TokenText({ inspector }: { inspector: TokenInspector }) {
  const { forks } = useChat();
  const root = useRef<HTMLDivElement>(null);
  const spans = inspector.spans.value;
  const scores = inspector.scores.value;
  const buttons = () => [...(root.current?.children ?? [])] as HTMLElement[];
  useLayoutEffect(() => {
    const all = buttons();
    if (spans && all.length > 0) moveRovingFocus(all, inspector.selected.peek() ?? 0);
  }, [spans]);
  const onKeyDown = (event: KeyboardEvent) => {
    const all = buttons();
    const from = all.indexOf(event.target as HTMLElement);
    if (from === -1) return;
    const to = step(event, all, from);
    if (event.key === "Enter" || event.key === " ") void inspector.select(from);
    else if (event.key === "Escape") {
      const tool = root.current?.closest(".answer")?.querySelector<HTMLElement>(".tool-tokens");
      forks.close();
      tool?.focus();
    } else {
      // roving tabindex: one tab stop, arrow keys inside the group
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      moveRovingFocus(all, to);
    }
    event.preventDefault();
    event.stopPropagation();
  };
  const onClick = (event: MouseEvent) => {
    const to = buttons().indexOf(event.target as HTMLElement);
    if (to === -1) return;
    moveRovingFocus(buttons(), to);
    void inspector.select(to);
  };
  const goToDoubt = (by: 1 | -1) => {
    const to = nextDoubt(inspector.doubts, inspector.focused.value, by);
    if (to !== null) moveRovingFocus(buttons(), to);
  };
  const step = (event: KeyboardEvent, all: readonly HTMLElement[], from: number) =>
    event.key.toLowerCase() === "d"
      ? (nextDoubt(inspector.doubts, from, event.shiftKey ? -1 : 1) ?? undefined)
      : STEPS[event.key]?.(all, from);
  if (!spans) return <p class="pending">Loading tokens</p>;
  return (
    <>
      <Confidence inspector={inspector} onDoubt={goToDoubt} />
      <div
        class="tokens"
        role="group"
        aria-label="Tokens of this answer"
        ref={root}
        onKeyDown={onKeyDown}
        onClick={onClick}
        onFocusCapture={(event) => {
          const at = buttons().indexOf(event.target as HTMLElement);
          if (at !== -1) inspector.focused.value = at;
        }}
      >
        {spans.map((span, place) => (
          <span
            key={span.index}
            class="token"
            role="button"
            tabIndex={-1}
            aria-expanded={place === inspector.selected.value}
            data-doubt={scores && doubtLevel(inspector.scoreAt(place)?.token.probability ?? 1)}
            aria-label={tokenLabel(span)}
          >
            {showLineBreaks(span.text)}
          </span>
        ))}
      </div>
    </>
  );
}

/** Number of doubts, steps between them, and the alternatives at the token with the focus; a click forks there. */
function Confidence({ inspector, onDoubt }: { inspector: TokenInspector; onDoubt: (by: 1 | -1) => void }) {
  const chat = useChat();
  if (!inspector.scores.value) return <p class="confidence hint">Computing the probability of every token</p>;
  const { doubts } = inspector;
  const at = inspector.focused.value;
  const score = inspector.scoreAt(at);
  const ordinal = doubts.indexOf(at) + 1;
  return (
    <section class="confidence" aria-label="Confidence">
      <p class="confidence-head">
        <span class="confidence-count">
          {ordinal > 0
            ? `Doubt ${ordinal} of ${doubts.length}`
            : doubts.length
              ? plural(doubts.length, "doubt")
              : "No doubts"}
        </span>
        <button
          type="button"
          class="tool"
          aria-label="Previous doubt"
          title="Previous doubt (Shift+D)"
          disabled={!doubts.length}
          onClick={() => onDoubt(-1)}
        >
          <Left />
        </button>
        <button
          type="button"
          class="tool"
          aria-label="Next doubt"
          title="Next doubt (D)"
          disabled={!doubts.length}
          onClick={() => onDoubt(1)}
        >
          <Right />
        </button>
        <span class="confidence-scale hint" aria-hidden="true">
          sure
          {[0, 1, 2, 3, 4].map((level) => (
            <i key={level} class="doubt-swatch" data-doubt={level} />
          ))}
          unlikely
        </span>
      </p>
      {score && (
        <p class="confidence-choices">
          <span class="hint">
            <mark>{showWhitespace(inspector.spans.value?.[at]?.text ?? "")}</mark>{" "}
            {formatPercent(score.token.probability)}
            {score.alternatives.some((each) => each.id !== score.token.id) && ", else"}
          </span>
          {score.alternatives
            .filter((each) => each.id !== score.token.id)
            .map((each) => (
              <button
                key={each.id}
                type="button"
                class="button confidence-choice"
                disabled={each.ends || chat.live.value !== null}
                title="Branch here with this token"
                onClick={() => chat.forks.branchAt(score.index, each)}
              >
                <span class="choice-text">{each.ends ? "end of answer" : showWhitespace(each.text)}</span>
                <span class="hint">{formatPercent(each.probability)}</span>
              </button>
            ))}
        </p>
      )}
    </section>
  );
}

const STEPS: Readonly<Record<string, (all: readonly HTMLElement[], from: number) => number>> = {
  ArrowRight: (all, from) => Math.min(all.length - 1, from + 1),
  ArrowLeft: (_, from) => Math.max(0, from - 1),
  ArrowDown: (all, from) => moveByLine(all, from, 1),
  ArrowUp: (all, from) => moveByLine(all, from, -1),
  Home: () => 0,
  End: (all) => all.length - 1,
};

/** Find the token above or below on screen. */
function moveByLine(all: readonly HTMLElement[], from: number, step: 1 | -1): number {
  const here = all[from]!.getBoundingClientRect();
  let best = from;
  let distance = Infinity;
  let line: number | null = null;
  for (let to = from + step; to >= 0 && to < all.length; to += step) {
    const there = all[to]!.getBoundingClientRect();
    if (Math.abs(there.top - here.top) < 4) continue;
    line ??= there.top;
    if (Math.abs(there.top - line) > 4) break;
    if (Math.abs(there.left - here.left) < distance) [best, distance] = [to, Math.abs(there.left - here.left)];
  }
  return best;
}

function moveRovingFocus(all: readonly HTMLElement[], to: number): void {
  for (const each of all) if (each.tabIndex === 0) each.tabIndex = -1;
  all[to]!.tabIndex = 0;
  all[to]!.focus();
}

/** Show line breaks as a character, so that they can be clicked. */
function showLineBreaks(text: string): string {
  return text.replaceAll("\n", "↵\n");
}

function tokenLabel(span: TokenSpan): string {
  return span.text.trim() === "" ? (span.text.includes("\n") ? "line break" : "space") : span.text.trim();
}

// -- Alternatives at the selected token, most likely first; choosing one creates a branch

const CONTEXT_CHARS = 28;

/** Popover at the selected token, if any; a child of the page, so that no container clips it. */
export function AlternativesPopover() {
  const inspector = useChat().forks.inspector.value;
  return inspector && inspector.selected.value !== null ? (
    <Popover key={inspector.message.key} inspector={inspector} at={inspector.selected.value} />
  ) : null;
}

function Popover({ inspector, at }: { inspector: TokenInspector; at: number }) {
  const { forks } = useChat();
  const box = useRef<HTMLDivElement>(null);
  const response = inspector.alternatives.value;
  const spans = inspector.spans.value ?? [];
  const dismiss = () => (inspector.word ? forks.close() : closeAndRefocus(inspector));

  useLayoutEffect(() => {
    const place = () =>
      positionPopover(box.current, inspector.word ? inspector.word.box() : selectedTokenBox(inspector), dismiss);
    place();
    addEventListener("scroll", place, true);
    addEventListener("resize", place);
    return () => {
      removeEventListener("scroll", place, true);
      removeEventListener("resize", place);
    };
  }, [at, response]);
  useLayoutEffect(() => {
    (box.current?.querySelector<HTMLElement>(".choice:enabled") ?? box.current)?.focus({ preventScroll: true });
  }, [response]);
  useLayoutEffect(() => {
    const outside = (event: PointerEvent) => {
      const target = event.target as HTMLElement;
      if (!box.current?.contains(target) && !target.closest(".token")) dismiss();
    };
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, [inspector]);

  const step = (by: number) => void inspector.select(Math.min(spans.length - 1, Math.max(0, at + by)));
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") dismiss();
    else if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp")
      moveFocus(box.current, event.key === "ArrowDown" ? 1 : -1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div
      class="alternatives"
      role="dialog"
      aria-label="Alternatives at this token"
      tabIndex={-1}
      ref={box}
      onKeyDown={onKeyDown}
    >
      <header class="alternatives-head">
        <button type="button" class="tool" aria-label="Previous token" disabled={at === 0} onClick={() => step(-1)}>
          <Left />
        </button>
        <p class="alternatives-token">
          <span class="hint">{textBefore(inspector, at)}</span>
          <mark>{showWhitespace(spans[at]?.text ?? "")}</mark>
        </p>
        <button
          type="button"
          class="tool"
          aria-label="Next token"
          disabled={at === spans.length - 1}
          onClick={() => step(1)}
        >
          <Right />
        </button>
        <button type="button" class="tool" aria-label="Close" onClick={dismiss}>
          <Close />
        </button>
      </header>
      {inspector.error.value && (
        <p class="ending ending-error" role="alert">
          {inspector.error.value}
        </p>
      )}
      {!response && !inspector.error.value && <p class="pending">Loading alternatives</p>}
      {response && <Choices response={response} />}
    </div>
  );
}

function Choices({ response }: { response: AlternativesResponse }) {
  const chat = useChat();
  const { input_tokens, cached_tokens } = response.usage;
  return (
    <>
      <ul class="choices">
        {rankChoices(response).map((choice) => (
          <li key={choice.id}>
            <button
              type="button"
              class="choice"
              aria-current={choice.isOriginal}
              disabled={choice.ends || chat.live.value !== null}
              onClick={() => {
                chat.forks.branch(choice);
                focusComposer();
              }}
            >
              <span class="choice-text">{choice.ends ? "end of answer" : showWhitespace(choice.text)}</span>
              {choice.isOriginal && <span class="badge">{originalLabel(choice, response.alternatives.length)}</span>}
              <ProbabilityBar share={choice.probability} />
              <span class="choice-share">{choice.rank === null ? "rare" : formatPercent(choice.probability)}</span>
            </button>
          </li>
        ))}
      </ul>
      <p class="hint">
        Choose a token to branch here. The lookup read {input_tokens} tokens, <b class="ink-cached">{cached_tokens}</b>{" "}
        of them cached.
      </p>
    </>
  );
}

function ProbabilityBar({ share }: { share: number }) {
  return (
    <svg class="choice-bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">
      <rect width={Math.max(0.5, share * 100)} height="1" />
    </svg>
  );
}

/** Label of the original token: its rank if it is not among the listed ones. */
function originalLabel(choice: Choice, shown: number): string {
  if (choice.rank === null) return "original, rank over 20";
  return choice.rank > shown ? `original, rank ${choice.rank}` : "original";
}

function textBefore(inspector: TokenInspector, at: number): string {
  const text = inspector.message.text.value.slice(0, inspector.spans.value?.[at]?.start ?? 0).replace(/\s+/g, " ");
  return text.length > CONTEXT_CHARS ? `…${text.slice(-CONTEXT_CHARS)}` : text;
}

// -- position of the popover

function selectedTokenBox(inspector: TokenInspector): DOMRect | null {
  const tokens = document.querySelectorAll<HTMLElement>(".tokens .token");
  return tokens.item(inspector.selected.peek() ?? 0)?.getClientRects()[0] ?? null;
}

function positionPopover(box: HTMLElement | null, anchor: DOMRect | null, dismiss: () => void): void {
  if (!box) return;
  if (!anchor || anchor.bottom < 0 || anchor.top > innerHeight) {
    dismiss();
    return;
  }
  placeNextTo(box, anchor);
}

function moveFocus(box: HTMLElement | null, by: number): void {
  const all = [...(box?.querySelectorAll<HTMLElement>(".choice:enabled") ?? [])];
  all[(all.indexOf(document.activeElement as HTMLElement) + by + all.length) % all.length]?.focus();
}

/** Close the popover and focus the token. */
function closeAndRefocus(inspector: TokenInspector): void {
  const at = inspector.selected.peek() ?? 0;
  void inspector.select(null);
  document.querySelectorAll<HTMLElement>(".tokens .token").item(at)?.focus();
}
