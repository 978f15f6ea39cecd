// A message's text as markdown, kept current outside Preact's diff: only the open block is drawn again.
import { effect } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { makeParser } from "../markdown/parser";
import { MarkdownStream } from "../markdown/stream";
import type { Message } from "../state/tree";

const parser = makeParser();

export function Markdown({ message }: { message: Message }) {
  const root = useRef<HTMLDivElement>(null);
  // before the paint: a picked answer must not blink
  useLayoutEffect(() => {
    if (!root.current) return;
    root.current.replaceChildren();
    const stream = new MarkdownStream(root.current, parser);
    return effect(() => {
      const growing = message.status.value === "streaming" || message.status.value === "waiting";
      stream.update(message.text.value, !growing);
    });
  }, [message]);
  return <div class="prose" ref={root} />;
}
