// The lines of the branch map: one path for the shown branch, one for all others.
import type { Spot } from "../../draw/branches";

export const ROW = 28; // px
const GRAPH_PX = 190; // the lanes share at most this
const WIDEST_PX = 18;
const NARROWEST_PX = 9;
const LEFT = 12;

export function laneWidth(lanes: number): number {
  return Math.max(NARROWEST_PX, Math.min(WIDEST_PX, Math.floor(GRAPH_PX / Math.max(1, lanes))));
}

export function xOf(lane: number, wide: number): number {
  return LEFT + lane * wide;
}

export function yOf(depth: number): number {
  return depth * ROW + ROW / 2;
}

export function branchLines(spots: readonly Spot[], onPath: ReadonlySet<string>, wide: number): { shown: string; other: string } {
  let [shown, other] = ["", ""];
  for (const spot of spots) {
    if (!spot.parent) continue;
    const line = lineTo(spot, spot.parent, wide);
    if (onPath.has(spot.message.key)) shown += line;
    else other += line;
  }
  return { shown, other };
}

function lineTo(spot: Spot, parent: Spot, wide: number): string {
  const [x, y] = [xOf(spot.lane, wide), yOf(spot.depth)];
  const [fromX, fromY] = [xOf(parent.lane, wide), yOf(parent.depth)];
  if (x === fromX) return `M${fromX} ${fromY}V${y}`;
  const bend = Math.min(8, x - fromX);
  return `M${fromX} ${fromY}v${ROW / 2 - bend}q0 ${bend} ${bend} ${bend}H${x - bend}q${bend} 0 ${bend} ${bend}V${y}`;
}
