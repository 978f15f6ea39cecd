// Saved prompts above the message box while its text is `/` and the beginning of a name. It takes the keys of the box.

import { useComputed, useSignal } from "@preact/signals";
import type { RefObject } from "preact";
import { useEffect, useLayoutEffect } from "preact/hooks";
import { plural } from "../../app/format";
import { filterMatches } from "../../app/matchText";
import { announce } from "../../app/notifications";
import { listPrompts, type SavedPrompt } from "../../server/savedPrompts";
import { useChat } from "../context";
import { toggleDialog } from "../navigation";
import { VariablesForm } from "./VariablesForm";
import "../palette.css";
import "./saved-prompts.css";

const optionId = (index: number) => `prompt-option-${index}`;

interface Option {
  readonly key: string;
  readonly label: string;
  readonly note: string;
  readonly run: () => void;
}

export function PromptMenu({ area }: { area: RefObject<HTMLTextAreaElement | null> }) {
  const chat = useChat();
  const { text } = chat.prefill;
  const prompts = useSignal<readonly SavedPrompt[]>([]);
  const problem = useSignal("");
  const filling = useSignal<SavedPrompt | null>(null);
  const dismissed = useSignal<string | null>(null); // the text at Escape: it and what continues it has no menu
  const active = useSignal(0);
  useEffect(() => {
    listPrompts().then(
      (found) => {
        prompts.value = found;
        announce(`${plural(found.length, "saved prompt")}.`);
      },
      (error: Error) => (problem.value = `The saved prompts did not load. ${error.message}`),
    );
  }, []);

  const insert = (message: string) => {
    text.value = message;
    area.current?.focus();
  };
  const choose = (prompt: SavedPrompt) => {
    if (prompt.variables.length > 0) filling.value = prompt;
    else insert(prompt.text);
  };
  const manage = () => {
    text.value = "";
    toggleDialog("prompts", true);
  };
  const options = useComputed<readonly Option[]>(() => {
    const query = text.value.slice(1);
    const found = filterMatches(query, prompts.value, ({ name }) => name).map(({ item }) => ({
      key: item.name,
      label: `/${item.name}`,
      note: item.description || item.text,
      run: () => choose(item),
    }));
    return query === "" ? [...found, { key: "", label: "Edit saved prompts…", note: "", run: manage }] : found;
  }).value;
  const isDismissed = dismissed.value !== null && text.value.startsWith(dismissed.value);
  const isShown = !isDismissed && filling.value === null && options.length > 0;
  const at = Math.min(active.value, options.length - 1);

  useLayoutEffect(() => {
    active.value = 0; // the best match of the new text
  }, [text.value]);

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.isComposing || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (event.key === "Escape") dismissed.value = text.value;
    else if (step !== 0) active.value = (at + step + options.length) % options.length;
    else if (event.key === "Enter") options[at]?.run();
    else return;
    event.preventDefault();
    event.stopImmediatePropagation(); // the message box would send the text, and Escape would stop the answer
  };
  useLayoutEffect(() => {
    const box = area.current;
    if (!box || !isShown) return;
    box.addEventListener("keydown", onKeyDown, true); // before the listener of the message box
    box.setAttribute("aria-controls", "prompt-options");
    box.setAttribute("aria-activedescendant", optionId(at));
    document.getElementById(optionId(at))?.scrollIntoView?.({ block: "nearest" });
    return () => {
      box.removeEventListener("keydown", onKeyDown, true);
      box.removeAttribute("aria-controls");
      box.removeAttribute("aria-activedescendant");
    };
  });

  if (filling.value !== null)
    return <VariablesForm prompt={filling.value} onFilled={insert} onClosed={() => (filling.value = null)} />;
  return (
    <>
      {problem.value !== "" && (
        <p class="hint" role="alert">
          {problem.value}
        </p>
      )}
      {isShown && (
        <div class="prompt-options" id="prompt-options" role="listbox" aria-label="Saved prompts">
          {options.map(({ key, label, note, run }, index) => (
            <div
              key={key}
              id={optionId(index)}
              role="option"
              tabIndex={-1}
              class="palette-option"
              aria-selected={index === at}
              onPointerMove={() => (active.value = index)}
              onPointerDown={(event) => event.preventDefault()} // the message box keeps the focus
              onClick={run}
            >
              <b>{label}</b>
              <span class="palette-label hint" dir="auto">
                {note}
              </span>
            </div>
          ))}
        </div>
      )}
    </>
  );
}
