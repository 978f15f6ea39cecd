// The lines of the branch map: one path for the shown branch, one for all others.
import type { MapNode } from "../../draw/branches";

export const ROW_PX = 28; // px
const GRAPH_PX = 190; // the lanes share at most this
const MAX_LANE_PX = 18;
const MIN_LANE_PX = 9;
const LEFT = 12;

export function laneWidth(lanes: number): number {
  return Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, Math.floor(GRAPH_PX / Math.max(1, lanes))));
}

export function xOf(lane: number, wide: number): number {
  return LEFT + lane * wide;
}

export function yOf(depth: number): number {
  return depth * ROW_PX + ROW_PX / 2;
}

export function branchLines(spots: readonly MapNode[], onPath: ReadonlySet<string>, wide: number): { shown: string; other: string } {
  let [shown, other] = ["", ""];
  for (const spot of spots) {
    if (!spot.parent) continue;
    const line = lineTo(spot, spot.parent, wide);
    if (onPath.has(spot.message.key)) shown += line;
    else other += line;
  }
  return { shown, other };
}

function lineTo(spot: MapNode, parent: MapNode, wide: number): string {
  const [x, y] = [xOf(spot.lane, wide), yOf(spot.depth)];
  const [fromX, fromY] = [xOf(parent.lane, wide), yOf(parent.depth)];
  if (x === fromX) return `M${fromX} ${fromY}V${y}`;
  const bend = Math.min(8, x - fromX);
  return `M${fromX} ${fromY}v${ROW_PX / 2 - bend}q0 ${bend} ${bend} ${bend}H${x - bend}q${bend} 0 ${bend} ${bend}V${y}`;
}
