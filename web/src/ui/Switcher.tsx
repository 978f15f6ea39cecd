// `< 2/3 >`: move between the versions of one message.
import type { Message } from "../state/tree";
import { useChat } from "./context";
import { Left, Right } from "./icons";

export function VersionSwitcher({ message }: { message: Message }) {
  const chat = useChat();
  const siblings = chat.thread.value.tree.value.siblings(message);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const go = (step: number) => {
    const target = siblings[at + step];
    if (target) chat.choose(target);
  };
  return (
    <span class="switcher" role="group" aria-label="Versions">
      <button type="button" class="tool" aria-label="Previous version" disabled={at === 0} onClick={() => go(-1)}>
        <Left />
      </button>
      <span class="switcher-place" aria-label={`Version ${at + 1} of ${siblings.length}`} role="img">
        {at + 1}/{siblings.length}
      </span>
      <button type="button" class="tool" aria-label="Next version" disabled={at === siblings.length - 1} onClick={() => go(1)}>
        <Right />
      </button>
    </span>
  );
}
