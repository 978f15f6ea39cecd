// An answer as the tokens it was written in. Every one is a button: the arrow keys walk over them, Enter opens one.
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Inside, Span } from "../state/inside";
import { useChat } from "./context";

export function TokenText({ inside }: { inside: Inside }) {
  const { forks } = useChat();
  const root = useRef<HTMLDivElement>(null);
  const spans = inside.spans.value;
  const buttons = () => [...(root.current?.children ?? [])] as HTMLElement[];
  useLayoutEffect(() => {
    const all = buttons();
    if (spans && all.length > 0) focusOnly(all, inside.at.peek() ?? 0);
  }, [spans]);
  const onKeyDown = (event: KeyboardEvent) => {
    const all = buttons();
    const from = all.indexOf(event.target as HTMLElement);
    if (from === -1) return;
    if (event.key === "Enter" || event.key === " ") void inside.look(from);
    else if (event.key === "Escape") {
      const tool = root.current?.closest(".answer")?.querySelector<HTMLElement>(".tool-inside");
      forks.close();
      tool?.focus();
    }
    else {
      // one stop for Tab, the arrow keys inside: the usual way of a group
      const to = STEPS[event.key]?.(all, from);
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      focusOnly(all, to);
    }
    event.preventDefault();
    event.stopPropagation();
  };
  const onClick = (event: MouseEvent) => {
    const to = buttons().indexOf(event.target as HTMLElement);
    if (to === -1) return;
    focusOnly(buttons(), to);
    void inside.look(to);
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
          aria-expanded={place === inside.at.value}
          aria-label={nameOf(span)}
        >
          {shown(span.text)}
        </span>
      ))}
    </div>
  );
}

const STEPS: Readonly<Record<string, (all: readonly HTMLElement[], from: number) => number>> = {
  ArrowRight: (all, from) => Math.min(all.length - 1, from + 1),
  ArrowLeft: (_, from) => Math.max(0, from - 1),
  ArrowDown: (all, from) => lineStep(all, from, 1),
  ArrowUp: (all, from) => lineStep(all, from, -1),
  Home: () => 0,
  End: (all) => all.length - 1,
};

/** The token above or below, as it looks on screen. */
function lineStep(all: readonly HTMLElement[], from: number, step: 1 | -1): number {
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

function focusOnly(all: readonly HTMLElement[], to: number): void {
  for (const each of all) if (each.tabIndex === 0) each.tabIndex = -1;
  all[to]!.tabIndex = 0;
  all[to]!.focus();
}

/** A line break shows itself, so that it can be clicked. */
function shown(text: string): string {
  return text.replaceAll("\n", "↵\n");
}

function nameOf(span: Span): string {
  return span.text.trim() === "" ? (span.text.includes("\n") ? "line break" : "space") : span.text.trim();
}
