// Read-aloud by the browser's own API. The button is shown only in browsers that have it.

import { signal } from "@preact/signals";
import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Speaker, Stop } from "./icons";

// One utterance per block, because some browsers cut long ones.

const BLOCKS = "p, li, h1, h2, h3, h4, h5, h6, td, th";
const NOT_SPOKEN = "pre, .code, .katex-html, ul, ol, table";

const speaking = signal<object | null>(null); // token of the answer that is read

/** Button that reads the text of the `.prose` in the same `article`. */
export function ReadAloudButton() {
  const button = useRef<HTMLButtonElement>(null);
  const token = useRef({});
  const isSpeaking = speaking.value === token.current;
  useEffect(() => () => stopSpeaking(token.current), []);
  if (!("speechSynthesis" in window)) return null;
  return (
    <button
      ref={button}
      type="button"
      class="tool"
      aria-label={isSpeaking ? "Stop reading" : "Read aloud"}
      aria-pressed={isSpeaking}
      title="Read aloud"
      onClick={() => (isSpeaking ? stopSpeaking(token.current) : speak(token.current, button))}
    >
      {isSpeaking ? <Stop /> : <Speaker />}
    </button>
  );
}

function speak(token: object, button: RefObject<HTMLButtonElement | null>): void {
  const prose = button.current?.closest("article")?.querySelector(".prose");
  const texts = prose ? spokenTexts(prose) : [];
  if (texts.length === 0) return;
  speechSynthesis.cancel();
  speaking.value = token;
  texts.forEach((text, index) => {
    const utterance = new SpeechSynthesisUtterance(text);
    const finish = () => {
      if (speaking.value === token) speaking.value = null;
    };
    if (index === texts.length - 1) utterance.onend = finish;
    utterance.onerror = finish;
    speechSynthesis.speak(utterance);
  });
}

function stopSpeaking(token: object): void {
  if (speaking.value !== token) return;
  speaking.value = null;
  speechSynthesis.cancel();
}

/** The texts of the blocks, without code. */
export function spokenTexts(prose: Element): readonly string[] {
  const texts = [...prose.querySelectorAll(BLOCKS)].map((block) => {
    const copy = block.cloneNode(true) as Element;
    for (const part of copy.querySelectorAll(NOT_SPOKEN)) part.remove(); // nested items are blocks of their own
    return copy.textContent?.replace(/\s+/g, " ").trim() ?? "";
  });
  return texts.filter((text) => text !== "");
}
