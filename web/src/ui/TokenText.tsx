// An answer as the tokens it was written in. Every one is a button: the arrow keys walk over them, Enter opens one.
import { useLayoutEffect, useRef } from "preact/hooks";
import type { TokenInspector, TokenSpan } from "../state/inside";
import { useChat } from "./context";

export function TokenText({ inside }: { inside: TokenInspector }) {
  const { forks } = useChat();
  const root = useRef<HTMLDivElement>(null);
  const spans = inside.spans.value;
  const buttons = () => [...(root.current?.children ?? [])] as HTMLElement[];
  useLayoutEffect(() => {
    const all = buttons();
    if (spans && all.length > 0) moveRovingFocus(all, inside.selected.peek() ?? 0);
  }, [spans]);
  const onKeyDown = (event: KeyboardEvent) => {
    const all = buttons();
    const from = all.indexOf(event.target as HTMLElement);
    if (from === -1) return;
    if (event.key === "Enter" || event.key === " ") void inside.select(from);
    else if (event.key === "Escape") {
      const tool = root.current?.closest(".answer")?.querySelector<HTMLElement>(".tool-inside");
      forks.close();
      tool?.focus();
    }
    else {
      // one stop for Tab, the arrow keys inside: the usual way of a group
      const to = STEPS[event.key]?.(all, from);
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
    void inside.select(to);
  };
  if (!spans) return <p class="waiting">Looking inside</p>;
  return (
    <div class="tokens" role="group" aria-label="Tokens of this answer" ref={root} onKeyDown={onKeyDown} onClick={onClick}>
      {spans.map((span, place) => (
        <span
          key={span.index}
          class="token"
          role="button"
          tabIndex={-1}
          aria-expanded={place === inside.selected.value}
          aria-label={tokenLabel(span)}
        >
          {showLineBreaks(span.text)}
        </span>
      ))}
    </div>
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

/** The token above or below, as it looks on screen. */
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

/** A line break shows itself, so that it can be clicked. */
function showLineBreaks(text: string): string {
  return text.replaceAll("\n", "↵\n");
}

function tokenLabel(span: TokenSpan): string {
  return span.text.trim() === "" ? (span.text.includes("\n") ? "line break" : "space") : span.text.trim();
}
