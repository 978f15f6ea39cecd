// A search while it runs: what all beams agree on stands in ink, what only the best one says so far is a ghost behind it.
import { effect, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { openStream } from "../markdown/lazy";
import type { Message } from "../state/tree";
import type { Turn } from "../state/turn";
import { Beams } from "./icons";
import { panel, togglePanel } from "./panels";
import { Pending } from "./Waiting";

const INNER = "UL, OL, LI, BLOCKQUOTE"; // the ghost goes on inside of them

export function LiveBeams({ turn }: { turn: Turn }) {
  const tree = turn.beamTree.value;
  void tree?.version.value;
  const agreed = tree?.agreed().depth ?? 0;
  return (
    <article class="answer answer-beams" aria-label="Assistant" aria-busy="true" data-status="searching">
      {tree ? <GhostText turn={turn} /> : <Pending turn={turn} />}
      <div class="answer-foot">
        <span class="figures">
          <span class="figure"><b>{tree?.live.length ?? turn.candidates.length}</b> beams open</span>
          <span class="figure"><b>{agreed}</b> tokens agreed</span>
        </span>
        {panel.value !== "beams" && (
          <button type="button" class="tool tool-wide" onClick={() => togglePanel("beams", true)}><Beams /> Watch the tree</button>
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
    const drawings = signal(0); // of what was solid before the renderer came
    const stream = openStream(prose, () => drawings.value++);
    const ghost = document.createElement("span");
    ghost.className = "ghost";
    ghost.setAttribute("aria-hidden", "true");
    let shown = "";
    return effect(() => {
      const solid = first.text.value;
      const tree = turn.beamTree.value;
      void [tree?.version.value, drawings.value];
      ghost.remove();
      if (solid !== shown) stream.update((shown = solid), false);
      const said = tree?.ghost(solid) ?? "";
      ghost.textContent = prose.hasChildNodes() ? (/\s*$/.exec(solid)?.[0] ?? "") + said : said.trimStart();
      if (said !== "") lastBlock(prose).append(ghost);
    });
  }, [turn]);
  return <div class="prose" ref={root} />;
}

/** Where text that follows `prose` goes on: its last paragraph, list item or program. */
function lastBlock(prose: HTMLElement): Element {
  let block: Element = prose;
  for (let last = prose.lastElementChild; last; last = last.lastElementChild) {
    block = last;
    if (!last.matches(INNER)) break;
  }
  return block.querySelector("pre code") ?? (block.matches(".table-wrap") ? prose : block);
}
