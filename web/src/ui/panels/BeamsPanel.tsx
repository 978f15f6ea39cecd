// Beam search panel: the tree, and the list of open beams during the search or of the kept beams after it.

import { effect, type ReadonlySignal, signal, useComputed, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { setSampling } from "../../app/settings";
import { type BeamNode, type BeamTree, describeLikelihood, percentPerToken } from "../../chat/beamTree";
import type { Thread } from "../../chat/thread";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { type BeamDrawing, CURVE_PX, clipDrawing, drawBeams, type Join, LANE_PX } from "../../draw/beams";
import { useChat } from "../context";
import { EmptyPanel } from "../EmptyState";
import { focusComposer } from "../navigation";

const DRAW_MS = 120;
const SHOWN_CHARS = 44; // the end of the text is shown, because beams differ there

export function BeamsPanel() {
  const chat = useChat();
  const turn = latestSearch(chat.thread.value);
  const tree = turn?.beamTree.value;
  if (turn && tree) return <BeamSearchView key={turn.key} turn={turn} tree={tree} />;
  if (turn?.live) return <p class="hint">Waiting for the first beams.</p>;
  const tryIt = () => {
    setSampling({ search: "beam", n: 4 });
    focusComposer(true);
  };
  return (
    <EmptyPanel title="Watch beam search" action="Try 4 beams" onAction={tryIt}>
      Beam search keeps the most likely texts and drops the others, token by token. All beams share the KV pages of
      their common beginning. Send a message with beam search to see the tree.
    </EmptyPanel>
  );
}

/** Return the latest beam search on the shown path. */
function latestSearch(thread: Thread): Turn | undefined {
  const turns = thread.tree.value.path.value.map((message) => thread.turnOf(message));
  return turns.findLast((turn) => turn && (turn.beamTree.value || (turn.beams && turn.live)));
}

interface KeptBeam {
  readonly message: Message;
  readonly node: BeamNode;
}

function BeamSearchView({ turn, tree }: { turn: Turn; tree: BeamTree }) {
  const chat = useChat();
  const hovered = useSignal<number | null>(null); // index of the beam under the pointer or focus
  const searching = turn.live;
  const version = useThrottled(tree.version, DRAW_MS);
  const kept = useComputed(() => (turn.phase.value === "ended" ? keptBeams(turn, tree) : []));
  const ends = kept.value.length > 0 ? kept.value.map(({ node }) => node) : tree.live;
  const chosen = hovered.value === null ? undefined : ends[hovered.value];
  const drawing = useMemo(
    () => drawBeams(tree, chosen ? [chosen, ...ends.filter((end) => end !== chosen)] : ends),
    [tree, version.value, chosen, kept.value],
  );
  const agreed = tree.agreed(ends);
  const dropped = drawing.pieces.filter((piece) => piece.kind === "dropped").length + drawing.ticks.length;
  const hasKept = kept.value.length > 0;
  const counts = `${ends.length} ${hasKept ? "kept" : "open"}, ${dropped} dropped`;
  const label = `Beam tree. ${counts}. All agree on ${agreed.depth} tokens.`;
  const hover = (index: number | null) => (hovered.value = index);
  return (
    <>
      <p class="side-summary" data-state={searching ? "searching" : "done"}>
        <b>{searching ? "Searching" : hasKept ? "Found" : "Stopped"}</b>
        <span>
          <b data-stat="open">{ends.length}</b> {hasKept ? "kept" : "open"}
        </span>
        <span>
          <b data-stat="agreed">{agreed.depth}</b> tokens agreed
        </span>
        <span>
          <b data-stat="dropped">{dropped}</b> dropped
        </span>
      </p>
      <BeamTreeView drawing={drawing} ends={ends} label={label} />
      <Legend alive={hasKept ? "kept" : "open"} />
      <h2 class="side-heading">{hasKept ? "Kept beams, best first" : "Open beams, most likely first"}</h2>
      <ol class="beam-list" onMouseLeave={() => hover(null)}>
        {ends.map((end, index) => {
          const message = kept.value[index]?.message;
          return (
            <li key={index}>
              <button
                type="button"
                class="beam-row"
                aria-current={message && message === chat.thread.value.tree.value.leaf.value ? "true" : undefined}
                onFocus={() => hover(index)}
                onBlur={() => hover(null)}
                onMouseEnter={() => hover(index)}
                onClick={() => message && chat.pick(message)}
              >
                <span class="beam-rank">
                  <span class="sr-only">Beam </span>
                  {index + 1}
                </span>
                <span class="beam-text">{beamSuffix(tree, end, agreed)}</span>
                <span class="beam-score">{describeScore(ends, index, hasKept)}</span>
              </button>
            </li>
          );
        })}
      </ol>
    </>
  );
}

/** Match the answers to nodes of the tree. Empty for a stopped search, whose answers are the common part. */
function keptBeams(turn: Turn, tree: BeamTree): readonly KeptBeam[] {
  const matches = turn.candidates.map((message) => ({ message, node: tree.find(message.text.value) }));
  const kept = matches.filter((beam): beam is KeptBeam => beam.node !== null);
  return new Set(kept.map(({ node }) => node)).size === kept.length ? kept : [];
}

function Legend({ alive }: { alive: string }) {
  return (
    <ul class="legend-line">
      <li>
        <svg viewBox="0 0 22 6" aria-hidden="true">
          <path class="beam-line beam-agreed" d="M0 3h22" />
        </svg>
        agreed
      </li>
      <li>
        <svg viewBox="0 0 22 6" aria-hidden="true">
          <path class="beam-line beam-open" d="M0 3h22" />
        </svg>
        {alive}
      </li>
      <li>
        <svg viewBox="0 0 22 6" aria-hidden="true">
          <path class="beam-line beam-dropped" d="M0 3h22" />
        </svg>
        dropped
      </li>
    </ul>
  );
}

/** Text of a beam after the common part; of a long text the end. */
function beamSuffix(tree: BeamTree, end: BeamNode, agreed: BeamNode): string {
  const text = tree.textOf(end).slice(tree.textOf(agreed).length).trim();
  return text.length > SHOWN_CHARS ? `…${text.slice(-SHOWN_CHARS)}` : text || "(no further text yet)";
}

/** Describe a score: likelihood for open beams (equal length), mean probability for kept ones (any length). */
function describeScore(ends: readonly BeamNode[], index: number, hasKept: boolean): string {
  const end = ends[index]!;
  const perToken = `${percentPerToken(end)}% per token`;
  if (hasKept) return `${index === 0 ? "the best · " : ""}${perToken} over ${end.depth} tokens`;
  return `${index === 0 ? "the best" : describeLikelihood(end.score, ends[0]!.score)} · ${perToken}`;
}

// -- Drawing of the tree: it grows to the right, and the view follows until the user scrolls back

const LEFT = 14; // room for the root
const TOP = 26; // room for the text above the first line
const RIGHT = 34; // room for the number at the end of a beam
const NEAR_END_PX = 24;
const OVERSCAN_PX = 400; // drawn beyond the visible part
const STEP_PX = 200; // scroll distance before more is drawn

interface Props {
  readonly drawing: BeamDrawing;
  readonly ends: readonly BeamNode[]; // best first
  readonly label: string;
}

function BeamTreeView({ drawing, ends, label }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const scrolled = useSignal(Infinity); // px; Infinity while following the end
  const width = LEFT + drawing.width + RIGHT;
  const height = TOP + (Math.max(1, drawing.lanes) - 1) * LANE_PX + 14;
  useLayoutEffect(() => {
    if (scrolled.peek() === Infinity) box.current?.scrollTo({ left: width });
  }, [width]);
  const seen = box.current?.clientWidth ?? OVERSCAN_PX;
  const left = Math.min(scrolled.value, width - seen);
  const shown = clipDrawing(drawing, left - OVERSCAN_PX, left + seen + OVERSCAN_PX);
  const onScroll = () => {
    const container = box.current;
    if (!container) return;
    const follows = container.scrollWidth - container.scrollLeft - container.clientWidth < NEAR_END_PX;
    scrolled.value = follows ? Infinity : Math.round(container.scrollLeft / STEP_PX) * STEP_PX;
  };
  return (
    <div
      class="beam-scroll"
      ref={box}
      onScroll={onScroll}
      tabIndex={0}
      role="group"
      aria-label="Beam tree, scrolls sideways"
    >
      <svg
        class="beam-tree"
        role="img"
        aria-label={label}
        width={width}
        height={height}
        viewBox={`0 0 ${width} ${height}`}
      >
        <path class="beam-line beam-agreed" d={`M${LEFT} ${TOP}h${CURVE_PX}`} />
        {shown.joins.map((join) => (
          <path key={join.key} class={lineClass(join)} d={curve(join)} />
        ))}
        {shown.pieces.map((piece) => (
          <g key={piece.key} class={`beam-piece beam-${piece.kind} ${piece.highlighted ? "beam-highlighted" : ""}`}>
            <path class={lineClass(piece)} d={`M${LEFT + piece.x} ${yOf(piece.lane)}h${piece.width}`} />
            {piece.width > 0 && (
              <text x={LEFT + piece.x} y={yOf(piece.lane) - 7} textLength={piece.width}>
                {piece.text}
              </text>
            )}
          </g>
        ))}
        <path class="beam-ticks" d={shown.ticks.map(({ x, lane }) => `M${LEFT + x} ${yOf(lane)}l4 6`).join("")} />
        <circle class="beam-root" cx={LEFT} cy={TOP} r="4" />
        {ends.map((end, index) => {
          const position = drawing.ends.get(end);
          return (
            position && (
              <g key={index} class={`beam-end ${index === 0 ? "beam-end-best" : ""}`}>
                <circle cx={LEFT + position.x + 14} cy={yOf(position.lane) - 1} r="8.5" />
                <text x={LEFT + position.x + 14} y={yOf(position.lane) + 2.5} text-anchor="middle">
                  {index + 1}
                </text>
              </g>
            )
          );
        })}
      </svg>
    </div>
  );
}

function yOf(lane: number): number {
  return TOP + lane * LANE_PX;
}

function curve({ x, from, to }: Join): string {
  const down = (to - from) * LANE_PX;
  return `M${LEFT + x} ${yOf(from)}c6 0 6 4 6 10V${yOf(from) + down - 8}c0 6 4 8 ${CURVE_PX - 6} 8`;
}

function lineClass({ kind, highlighted }: { kind: string; highlighted: boolean }): string {
  return `beam-line beam-${kind} ${highlighted ? "beam-highlighted" : ""}`;
}

/** Return a signal that follows `source` at most once per `everyMs`, immediately after a pause. */
function useThrottled<T>(source: ReadonlySignal<T>, everyMs: number): ReadonlySignal<T> {
  const shown = useMemo(() => signal(source.peek()), [source]);
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const stop = effect(() => {
      void source.value;
      if (timer !== undefined) return;
      shown.value = source.peek();
      timer = setTimeout(() => {
        timer = undefined;
        shown.value = source.peek();
      }, everyMs);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [source]);
  return shown;
}
