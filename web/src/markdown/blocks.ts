// What a rendered block gets beyond its markup: frames around code, tables that scroll, drawn formulas, task marks.
import { frameCode } from "./code";
import { drawFormulas } from "./formulas";

/** Finish the nodes of `fragment` before they are shown. `complete`: no more text will come for them. */
export function decorateBlocks(fragment: DocumentFragment, complete: boolean): void {
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre, complete);
  for (const item of fragment.querySelectorAll("li")) decorateTask(item);
  for (const wrap of fragment.querySelectorAll<HTMLElement>(".table-wrap")) makeScrollable(wrap, "Table");
  drawFormulas(fragment);
}

/** What is wider than the column scrolls; the keyboard must reach it. */
function makeScrollable(box: HTMLElement, label: string): void {
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
}

/** `[ ]` and `[x]` at the head of a list item, as a mark rather than brackets. */
function decorateTask(item: HTMLElement): void {
  const first = item.firstChild?.nodeType === Node.TEXT_NODE ? item.firstChild : item.firstChild?.firstChild;
  const match = first?.nodeType === Node.TEXT_NODE ? /^\[([ xX])\]\s/.exec(first.textContent ?? "") : null;
  if (!first || !match) return;
  first.textContent = (first.textContent ?? "").slice(match[0].length);
  const mark = document.createElement("span");
  mark.className = match[1] === " " ? "task" : "task task-done";
  mark.textContent = match[1] === " " ? "☐ " : "☑ ";
  item.prepend(mark);
  item.classList.add("task-item");
}
