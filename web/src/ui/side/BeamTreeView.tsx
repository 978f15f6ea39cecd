// The beam tree, drawn: it grows to the right, and the view goes with it until the reader scrolls back.
import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { type BeamDrawing, CURVE, type Join, LANE, clipDrawing } from "../../draw/beams";
import type { BeamNode } from "../../state/beams";

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

export function BeamTreeView({ drawing, ends, label }: Props) {
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
    <div class="beam-scroll" ref={box} onScroll={onScroll} tabIndex={0} role="group" aria-label="Beam tree, scrolls sideways">
      <svg class="beam-tree" role="img" aria-label={label} width={width} height={height} viewBox={`0 0 ${width} ${height}`}>
        <path class="beam-line beam-agreed" d={`M${LEFT} ${TOP}h${CURVE}`} />
        {shown.joins.map((join) => (
          <path key={join.key} class={lineClass(join)} d={curve(join)} />
        ))}
        {shown.pieces.map((piece) => (
          <g key={piece.key} class={`beam-piece beam-${piece.kind} ${piece.highlighted ? "beam-lit" : ""}`}>
            <path class={lineClass(piece)} d={`M${LEFT + piece.x} ${yOf(piece.lane)}h${piece.width}`} />
            {piece.width > 0 && (
              <text x={LEFT + piece.x} y={yOf(piece.lane) - 7} textLength={piece.width}>{piece.text}</text>
            )}
          </g>
        ))}
        <path class="beam-ticks" d={shown.ticks.map(({ x, lane }) => `M${LEFT + x} ${yOf(lane)}l4 6`).join("")} />
        <circle class="beam-root" cx={LEFT} cy={TOP} r="4" />
        {ends.map((end, index) => {
          const place = drawing.ends.get(end);
          return place && (
            <g key={index} class={`beam-end ${index === 0 ? "beam-end-best" : ""}`}>
              <circle cx={LEFT + place.x + 14} cy={yOf(place.lane) - 1} r="8.5" />
              <text x={LEFT + place.x + 14} y={yOf(place.lane) + 2.5} text-anchor="middle">{index + 1}</text>
            </g>
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
