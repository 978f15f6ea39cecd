// Branch map of the conversation: a node per message, a lane per branch, the shown path highlighted. Click or arrow
// keys go to a message. Only visible rows are rendered.

import { useComputed, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { truncate } from "../../app/format";
import { describeMessage } from "../../chat/attachments";
import type { Message, Tree } from "../../chat/tree";
import {
  branchLines,
  drawBranches,
  laneWidth,
  type MapNode,
  neighbour,
  ROW_PX,
  type Step,
  xOf,
  yOf,
} from "../../draw/branches";
import { useChat } from "../context";
import { EmptyPanel } from "../EmptyState";
import { focusComposer, goToMessage } from "../navigation";
import { BranchList } from "./BranchList";

const OVERSCAN_ROWS = 8; // rendered beyond the visible part
const STEPS: Readonly<Record<string, Step>> = {
  ArrowUp: "up",
  ArrowDown: "down",
  ArrowLeft: "left",
  ArrowRight: "right",
  Home: "first",
  End: "last",
};

export function BranchesPanel() {
  const chat = useChat();
  const tree = chat.thread.value.tree.value;
  if (tree.path.value.length > 0) return <BranchMap tree={tree} />;
  return (
    <EmptyPanel title="Every message can branch" action="Send a message" onAction={() => focusComposer(true)}>
      Edit a message, regenerate an answer or pick another candidate: the old version stays as a branch that shares all
      KV pages before it. This map shows every branch; click a dot to go to it.
    </EmptyPanel>
  );
}

function BranchMap({ tree }: { tree: Tree }) {
  const chat = useChat();
  const box = useRef<HTMLDivElement>(null);
  const view = useSignal({ first: 0, last: 60 });
  const hovered = useSignal<Message | null>(null);
  const cursor = useSignal<Message | null>(null);
  const path = tree.path.value;
  const drawing = useMemo(() => drawBranches(tree), [tree, path]);
  const onPath = useComputed(() => new Set(tree.path.value.map((message) => message.key)));
  const at = cursor.value && tree.get(cursor.value.key) === cursor.value ? cursor.value : path.at(-1)!;

  const updateView = () => {
    const { scrollTop = 0, clientHeight = 0 } = box.current ?? {};
    const first = Math.max(0, Math.floor(scrollTop / ROW_PX) - OVERSCAN_ROWS);
    const last = Math.ceil((scrollTop + clientHeight) / ROW_PX) + OVERSCAN_ROWS;
    if (first !== view.peek().first || last !== view.peek().last) view.value = { first, last };
  };
  useLayoutEffect(updateView, []);
  useEffect(() => {
    const observer = new ResizeObserver(updateView);
    if (box.current) observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  // keep the current node visible
  useLayoutEffect(() => {
    const node = drawing.nodes.get(at.key);
    const scroller = box.current;
    if (!node || !scroller) return;
    const top = yOf(node.depth) - ROW_PX / 2;
    if (top < scroller.scrollTop) scroller.scrollTop = top - ROW_PX;
    else if (top + ROW_PX > scroller.scrollTop + scroller.clientHeight)
      scroller.scrollTop = top + 2 * ROW_PX - scroller.clientHeight;
    updateView();
  }, [at, drawing]);

  const go = (message: Message) => {
    cursor.value = message;
    goToMessage(chat, message);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const step = STEPS[event.key];
    if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const target = neighbour(tree, at, step);
    if (target) go(target);
  };
  const laneWidthPx = laneWidth(drawing.lanes);
  const { first, last } = view.value;
  const shown = [...drawing.nodes.values()].filter(
    (node) => node.message === at || (node.depth >= first && node.depth <= last),
  );
  const lines = branchLines(shown, onPath.value, laneWidthPx);
  const graphWidth = drawing.lanes * laneWidthPx + 12;
  const previewed = hovered.value ?? at;
  const branches = countLeaves(drawing.nodes);
  return (
    <>
      <p class="side-summary">
        <span>
          <b data-stat="messages">{drawing.nodes.size}</b> messages
        </span>
        <span>
          <b data-stat="branches">{branches}</b> {branches === 1 ? "branch" : "branches"}
        </span>
      </p>
      <div class="branch-scroll" ref={box} onScroll={updateView}>
        <div class="branch-map">
          <svg
            class="branch-graph"
            role="tree"
            aria-label="Branches of this conversation. Arrow keys go to a message."
            tabindex={0}
            aria-activedescendant={`map-node-${at.key}`}
            width={graphWidth}
            height={drawing.rows * ROW_PX}
            onKeyDown={onKeyDown}
            onMouseLeave={() => (hovered.value = null)}
          >
            <path class="branch-line" d={lines.other} />
            <path class="branch-line branch-line-on-path" d={lines.shown} />
            {shown.map((node) => (
              <MapDot
                key={node.message.key}
                node={node}
                tree={tree}
                laneWidthPx={laneWidthPx}
                on={onPath.value.has(node.message.key)}
                at={node.message === at}
                onGo={go}
                onPoint={(message) => (hovered.value = message)}
              />
            ))}
          </svg>
          <Labels path={path} first={first} last={last} at={at} onGo={go} />
        </div>
      </div>
      <div class="branch-preview" aria-hidden="true">
        <span class="hint">{messageTitle(tree, previewed)}</span>
        <p>{truncate(labelOf(previewed) || "…", 220)}</p>
      </div>
      <BranchList tree={tree} />
    </>
  );
}

interface DotProps {
  readonly node: MapNode;
  readonly tree: Tree;
  readonly laneWidthPx: number;
  readonly on: boolean;
  readonly at: boolean;
  readonly onGo: (message: Message) => void;
  readonly onPoint: (message: Message) => void;
}

function MapDot({ node, tree, laneWidthPx, on, at, onGo, onPoint }: DotProps) {
  const { message } = node;
  const [x, y] = [xOf(node.lane, laneWidthPx), yOf(node.depth)];
  return (
    <g
      id={`map-node-${message.key}`}
      class={`map-node map-node-${message.role} ${on ? "map-node-on-path" : ""} ${at ? "map-node-current" : ""}`}
      role="treeitem"
      aria-level={node.depth + 1}
      aria-selected={on}
      aria-label={`${messageTitle(tree, message)}: ${truncate(message.text.peek(), 80)}`}
      onClick={() => onGo(message)}
      onMouseEnter={() => onPoint(message)}
    >
      <rect class="map-node-target" x={x - laneWidthPx / 2} y={y - ROW_PX / 2} width={laneWidthPx} height={ROW_PX} />
      {message.role === "user" ? (
        <rect x={x - 4} y={y - 4} width="8" height="8" rx="2" />
      ) : (
        <circle cx={x} cy={y} r="4.5" />
      )}
    </g>
  );
}

/** Text of the messages on the shown path, one line per row. */
function Labels({
  path,
  first,
  last,
  at,
  onGo,
}: {
  readonly path: readonly Message[];
  readonly first: number;
  readonly last: number;
  readonly at: Message;
  readonly onGo: (message: Message) => void;
}) {
  const list = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (list.current) list.current.style.paddingTop = `${first * ROW_PX}px`;
  }, [first]);
  return (
    <div class="branch-labels" aria-hidden="true" ref={list}>
      {path.slice(first, last + 1).map((message) => (
        <div
          key={message.key}
          class={`branch-label branch-label-${message.role} ${message === at ? "branch-label-current" : ""}`}
          onClick={() => onGo(message)}
        >
          {truncate(labelOf(message), 120) || "…"}
        </div>
      ))}
    </div>
  );
}

function labelOf({ role, text }: Message): string {
  return role === "user" ? describeMessage(text.value) : text.value.replace(/\s+/g, " ");
}

function messageTitle(tree: Tree, message: Message): string {
  const siblings = tree.siblings(message);
  const author = message.role === "user" ? "You" : "Answer";
  return siblings.length > 1 ? `${author}, version ${siblings.indexOf(message) + 1} of ${siblings.length}` : author;
}

function countLeaves(nodes: ReadonlyMap<string, MapNode>): number {
  const parents = new Set<MapNode | null>([...nodes.values()].map((node) => node.parent));
  return [...nodes.values()].filter((node) => !parents.has(node)).length;
}
