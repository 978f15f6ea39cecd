// Beam search as it happens: the tree above, the open beams below in words. Afterwards the beams that were kept.

import { effect, type ReadonlySignal, signal, useComputed, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { setSampling } from "../../app/settings";
import { type BeamNode, type BeamTree, describeLikelihood, percentPerToken } from "../../chat/beamTree";
import type { Thread } from "../../chat/thread";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { type BeamDrawing, CURVE, clipDrawing, drawBeams, type Join, LANE } from "../../draw/beams";
import { useChat } from "../context";
import { EmptyPanel } from "../EmptyState";
import { focusComposer } from "../navigation";

const DRAW_MS = 120;
const SHOWN_CHARS = 44; // of much the end: that is where beams differ

export function BeamsPanel() {
  const chat = useChat();
  const turn = latestSearch(chat.thread.value);
  const tree = turn?.beamTree.value;
  if (turn && tree) return <BeamSearchView key={turn.key} turn={turn} tree={tree} />;
  if (turn?.live) return <p class="hint">The first beams are on their way.</p>;
  const tryIt = () => {
    setSampling({ search: "beam", n: 4 });
    focusComposer();
  };
  return (
    <EmptyPanel title="Watch a search think" action="Try 4 beams" onAction={tryIt}>
      Beam search keeps the likeliest texts side by side and drops the others, token by token. All of them share the
      pages of what they have in common. Ask something with beams, and the tree grows here.
    </EmptyPanel>
  );
}

/** The latest search on the shown path. */
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
  const held = useSignal<number | null>(null); // the beam that the reader looks at
  const searching = turn.live;
  const version = useThrottled(tree.version, DRAW_MS);
  const kept = useComputed(() => (turn.phase.value === "ended" ? keptBeams(turn, tree) : []));
  const ends = kept.value.length > 0 ? kept.value.map(({ node }) => node) : tree.live;
  const chosen = held.value === null ? undefined : ends[held.value];
  const drawing = useMemo(
    () => drawBeams(tree, chosen ? [chosen, ...ends.filter((end) => end !== chosen)] : ends),
    [tree, version.value, chosen, kept.value],
  );
  const agreed = tree.agreed();
  const dropped = drawing.pieces.filter((piece) => piece.kind === "dead").length + drawing.ticks.length;
  const found = kept.value.length > 0;
  const label = `Beam tree. ${ends.length} ${found ? "kept" : "open"}, ${dropped} dropped. All agree on ${agreed.depth} tokens.`;
  const look = (index: number | null) => (held.value = index);
  return (
    <>
      <p class="side-summary" data-state={searching ? "searching" : "done"}>
        <b>{searching ? "Searching" : found ? "Found" : "Stopped"}</b>
        <span>
          <b data-stat="open">{ends.length}</b> {found ? "kept" : "open"}
        </span>
        <span>
          <b data-stat="agreed">{agreed.depth}</b> tokens agreed
        </span>
        <span>
          <b data-stat="dropped">{dropped}</b> dropped
        </span>
      </p>
      <BeamTreeView drawing={drawing} ends={ends} label={label} />
      <Legend alive={found ? "kept" : "open"} />
      <h2 class="side-heading">{found ? "Kept beams, best first" : "Open beams, likeliest first"}</h2>
      <ol class="beam-list" onMouseLeave={() => look(null)}>
        {ends.map((end, index) => {
          const message = kept.value[index]?.message;
          return (
            <li key={index}>
              <button
                type="button"
                class="beam-row"
                aria-current={message && message === chat.thread.value.tree.value.leaf.value ? "true" : undefined}
                onFocus={() => look(index)}
                onBlur={() => look(null)}
                onMouseEnter={() => look(index)}
                onClick={() => message && chat.pick(message)}
              >
                <span class="beam-rank">
                  <span class="sr-only">Beam </span>
                  {index + 1}
                </span>
                <span class="beam-text">{beamSuffix(tree, end, agreed)}</span>
                <span class="beam-score">{describeScore(ends, index, found)}</span>
              </button>
            </li>
          );
        })}
      </ol>
    </>
  );
}

/** Which of the tree's nodes the answers are, in their order; none of a search that was stopped, which kept what all say. */
function keptBeams(turn: Turn, tree: BeamTree): readonly KeptBeam[] {
  const found = turn.candidates.map((message) => ({ message, node: tree.find(message.text.value) }));
  const kept = found.filter((beam): beam is KeptBeam => beam.node !== null);
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

/** What a beam says beyond what all agree on; of much the end. */
function beamSuffix(tree: BeamTree, end: BeamNode, agreed: BeamNode): string {
  const text = tree.textOf(end).slice(tree.textOf(agreed).length).trim();
  return text.length > SHOWN_CHARS ? `…${text.slice(-SHOWN_CHARS)}` : text || "(nothing more yet)";
}

/** Of open beams, which all have as many tokens, how likely they are; of kept ones, what a length counts out of. */
function describeScore(ends: readonly BeamNode[], index: number, found: boolean): string {
  const end = ends[index]!;
  const perToken = `${percentPerToken(end)}% a token`;
  if (found) return `${index === 0 ? "the best · " : ""}${perToken} over ${end.depth} tokens`;
  return `${index === 0 ? "the best" : describeLikelihood(end.score, ends[0]!.score)} · ${perToken}`;
}

// ---- The beam tree, drawn: it grows to the right, and the view goes with it until the reader scrolls back.

const LEFT = 14; // px, room for the prompt's dot
const TOP = 26; // px, room for the text above the first line
const RIGHT = 34; // px, room for the place at a beam's end
const NEAR_PX = 24;
const SPARE_PX = 400; // drawn beyond what is in sight
const STEP_PX = 200; // scrolled before more is drawn

interface Props {
  readonly drawing: BeamDrawing;
  readonly ends: readonly BeamNode[]; // best first
  readonly label: string;
}

function BeamTreeView({ drawing, ends, label }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const scrolled = useSignal(Infinity); // px; as long as it follows, the end
  const width = LEFT + drawing.width + RIGHT;
  const height = TOP + (Math.max(1, drawing.lanes) - 1) * LANE + 14;
  useLayoutEffect(() => {
    if (scrolled.peek() === Infinity) box.current?.scrollTo({ left: width });
  }, [width]);
  const seen = box.current?.clientWidth ?? SPARE_PX;
  const left = Math.min(scrolled.value, width - seen);
  const shown = clipDrawing(drawing, left - SPARE_PX, left + seen + SPARE_PX);
  const onScroll = () => {
    const at = box.current;
    if (!at) return;
    const follows = at.scrollWidth - at.scrollLeft - at.clientWidth < NEAR_PX;
    scrolled.value = follows ? Infinity : Math.round(at.scrollLeft / STEP_PX) * STEP_PX;
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
        <path class="beam-line beam-agreed" d={`M${LEFT} ${TOP}h${CURVE}`} />
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
          const place = drawing.ends.get(end);
          return (
            place && (
              <g key={index} class={`beam-end ${index === 0 ? "beam-end-best" : ""}`}>
                <circle cx={LEFT + place.x + 14} cy={yOf(place.lane) - 1} r="8.5" />
                <text x={LEFT + place.x + 14} y={yOf(place.lane) + 2.5} text-anchor="middle">
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
  return TOP + lane * LANE;
}

function curve({ x, from, to }: Join): string {
  const down = (to - from) * LANE;
  return `M${LEFT + x} ${yOf(from)}c6 0 6 4 6 10V${yOf(from) + down - 8}c0 6 4 8 ${CURVE - 6} 8`;
}

function lineClass({ kind, highlighted }: { kind: string; highlighted: boolean }): string {
  return `beam-line beam-${kind} ${highlighted ? "beam-lit" : ""}`;
}

// ---- Slows a signal down to what is worth drawing.

/** A signal that follows `source`, at once after a quiet time and then once per `everyMs`. */
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
