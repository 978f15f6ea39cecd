// Footnotes: `[^1]` in a text, and `[^1]: ...` anywhere in it. References and notes lead to each other by buttons, as the
// address of the page is that of a message.

import footnote from "markdown-it-footnote";
import type { Parser } from "./parser";

export function addFootnotes(md: Parser): Parser {
  md.use(footnote).disable(["footnote_inline"]); // `^[` is more often a power than a note
  const { rules } = md.renderer;
  rules.footnote_ref = (tokens, index) => {
    const { id } = tokens[index]!.meta as { id: number }; // from 0, in the order of the references
    return `<span class="footnote-ref">${id + 1}</span>`;
  };
  rules.footnote_block_open = () => '<ol class="footnotes">';
  rules.footnote_block_close = () => "</ol>";
  rules.footnote_open = () => '<li class="footnote">';
  rules.footnote_close = () => "</li>";
  rules.footnote_anchor = () => "";
  return md;
}

/** Turn the references of a rendered text into buttons, and add one to each note that leads back. */
export function linkFootnotes(fragment: DocumentFragment): void {
  const notes = [...fragment.querySelectorAll<HTMLElement>(".footnote")];
  if (notes.length === 0) return;
  notes[0]!.parentElement!.setAttribute("aria-label", "Footnotes");
  for (const reference of [...fragment.querySelectorAll(".footnote-ref")].reverse()) {
    const number = reference.textContent!;
    const note = notes[Number(number) - 1];
    if (!note) continue;
    const there = makeButton("footnote-ref", number, `Footnote ${number}`, () => show(note));
    reference.replaceWith(there);
    note.querySelector(".footnote-back")?.remove(); // the first reference, the last one here, counts
    const end = note.querySelector(":scope > p:last-child") ?? note;
    end.append(makeButton("footnote-back", "↩", `Back to reference ${number}`, () => show(there)));
  }
  for (const note of notes) note.tabIndex = -1;
}

function makeButton(name: string, text: string, label: string, go: () => void): HTMLButtonElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = name;
  button.textContent = text;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", go);
  return button;
}

function show(element: HTMLElement): void {
  element.scrollIntoView({ block: "nearest" });
  element.focus({ preventScroll: true });
}
