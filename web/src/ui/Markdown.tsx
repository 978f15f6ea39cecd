// A message's text as markdown, kept current outside Preact's diff: only the open block is drawn again.
import { effect } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { openStream } from "../markdown/lazy";
import { Pace } from "../markdown/pace";
import type { Message } from "../state/tree";

const pace = new Pace();

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
      if (growing && shown) pace.request(stream, () => stream.update(text, false));
      else pace.now(stream, () => stream.update(text, !growing));
      shown = true;
    });
    return () => {
      stop();
      pace.forget(stream);
    };
  }, [message]);
  return <div class="prose" ref={root} />;
}
