// A running beam search: text that all beams share is solid, the rest of the best beam is ghost text.

import { effect, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { openStream } from "../../markdown/textStream";
import { Beams } from "../icons";
import { panel, togglePanel } from "../navigation";
import { Pending } from "./MessageParts";

const INNER = "UL, OL, LI, BLOCKQUOTE"; // the ghost text continues inside these elements

export function LiveBeams({ turn }: { turn: Turn }) {
  const tree = turn.beamTree.value;
  void tree?.version.value;
  const agreed = tree?.agreed().depth ?? 0;
  return (
    <article class="answer answer-beams" aria-label="Assistant" aria-busy="true" data-status="searching">
      {tree ? <GhostText turn={turn} /> : <Pending turn={turn} />}
      <div class="answer-foot">
        <span class="stats">
          <span class="stat">
            <b>{tree?.live.length ?? turn.candidates.length}</b> beams open
          </span>
          <span class="stat">
            <b>{agreed}</b> tokens agreed
          </span>
        </span>
        {panel.value !== "beams" && (
          <button type="button" class="tool tool-wide" onClick={() => togglePanel("beams", true)}>
            <Beams /> Watch the tree
          </button>
        )}
      </div>
    </article>
  );
}

function GhostText({ turn }: { turn: Turn }) {
  const root = useRef<HTMLDivElement>(null);
  const first = turn.candidates[0] as Message;
  useLayoutEffect(() => {
    if (!root.current) return;
    const prose = root.current;
    const drawings = signal(0); // counts drawings of the solid text made when the renderer was loaded
    const stream = openStream(prose, () => drawings.value++);
    const ghost = document.createElement("span");
    ghost.className = "ghost";
    ghost.setAttribute("aria-hidden", "true");
    let shown = "";
    return effect(() => {
      const shared = first.text.value;
      const tree = turn.beamTree.value;
      void [tree?.version.value, drawings.value];
      ghost.remove();
      if (shared !== shown) stream.update(shared, false);
      shown = shared;
      const rest = tree?.ghost(shared) ?? "";
      ghost.textContent = prose.hasChildNodes() ? (/\s*$/.exec(shared)?.[0] ?? "") + rest : rest.trimStart();
      if (rest !== "") lastBlock(prose).append(ghost);
    });
  }, [turn]);
  return <div class="prose" ref={root} />;
}

/** Return the element where text after `prose` continues: the last paragraph, list item or code block. */
function lastBlock(prose: HTMLElement): Element {
  let block: Element = prose;
  for (let last = prose.lastElementChild; last; last = last.lastElementChild) {
    block = last;
    if (!last.matches(INNER)) break;
  }
  return block.querySelector("pre code") ?? (block.matches(".table-wrap") ? prose : block);
}
