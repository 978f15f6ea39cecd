// The frame around a code block: its language, a copy button, and colours once the block is complete.
import { copyText } from "./clipboard";
import { highlight } from "./highlight";

const COPIED_MS = 1600;

/** Wrap `pre` in a labelled frame. Colours come only when `complete`: half a program has no stable syntax. */
export function frameCode(pre: HTMLPreElement, complete: boolean): HTMLElement {
  const code = pre.querySelector("code");
  const language = code?.dataset["language"] ?? "";
  const frame = document.createElement("figure");
  frame.className = "code";
  const bar = document.createElement("figcaption");
  bar.className = "code-bar";
  const label = document.createElement("span");
  label.textContent = language || "text";
  bar.append(label, copyButton(pre));
  pre.tabIndex = 0; // wide code scrolls; the keyboard must reach it
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `${language} code` : "code");
  pre.replaceWith(frame);
  frame.append(bar, pre);
  if (complete && code && language) void highlight(code, language);
  return frame;
}

function copyButton(pre: HTMLPreElement): HTMLButtonElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "code-copy";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    void copyText(pre.textContent ?? "").then((done) => {
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
    });
  });
  return button;
}
