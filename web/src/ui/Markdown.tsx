// A message's text as markdown, kept current outside Preact's diff: only the open block is drawn again.
import { effect } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { openStream } from "../markdown/lazy";
import { DrawPacer } from "../markdown/pace";
import type { Message } from "../state/tree";

const pace = new DrawPacer();

export function Markdown({ message }: { message: Message }) {
  const root = useRef<HTMLDivElement>(null);
  // before the paint: a picked answer must not blink
  useLayoutEffect(() => {
    if (!root.current) return;
    root.current.replaceChildren();
    const stream = openStream(root.current);
    let shown = false;
    const stop = effect(() => {
      const growing = message.status.value === "streaming" || message.status.value === "waiting";
      const text = message.text.value;
      if (growing && shown) pace.schedule(stream, () => stream.update(text, false));
      else pace.drawNow(stream, () => stream.update(text, !growing));
      shown = true;
    });
    return () => {
      stop();
      pace.cancel(stream);
    };
  }, [message]);
  return <div class="prose" ref={root} />;
}
