// Whether an answer matches the JSON schema that it was asked for: shown as it grows, announced once when it ends. The
// validator is loaded with the first such answer.

import { effect, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { loadSettings } from "../../chat/answerSettings";
import type { SchemaVerdict } from "../../chat/schemaCheck";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { Check, Close } from "../icons";
import { pacer } from "./MessageParts";

// A text that may have been asked for with a schema.
const LIKE_JSON = /^\s*(?:["{[]|(?:-?\d[\d.eE+-]*|true|false|null)\s*$)/;

interface Shown {
  readonly state: SchemaVerdict["state"];
  readonly text: string;
}

export function SchemaStatus({ message, turn }: { message: Message; turn: Turn }) {
  const verdict = useSignal<Shown | null>(null);
  const spoken = useSignal(""); // the verdict on an answer that has ended while it was shown
  const grew = useRef(isGrowing(message)); // a short answer ends before effects run
  const schema = turn.settings.value?.schema ?? null;
  const isStored = turn.settings.value === null && !turn.live && LIKE_JSON.test(message.text.value);
  useEffect(() => {
    if (isStored) loadSettings(turn);
  }, [turn, isStored]);
  useEffect(() => {
    if (schema === null) return;
    const owner = {};
    let stop: (() => void) | null = () => {};
    void import("../../chat/schemaCheck").then(
      ({ schemaChecker, describeVerdict }) => {
        if (stop === null) return;
        const check = schemaChecker(schema);
        stop = effect(() => {
          const text = message.text.value;
          const growing = isGrowing(message);
          const show = () => {
            const found = text === "" ? null : check(text, !growing);
            verdict.value = found && { state: found.state, text: describeVerdict(found) };
          };
          if (growing) {
            pacer.schedule(owner, show);
            return;
          }
          pacer.drawNow(owner, show);
          if (grew.current && verdict.peek()) spoken.value = verdict.peek()!.text;
        });
      },
      () => {}, // did not load: nothing is shown, the next answer tries again
    );
    return () => {
      stop?.();
      stop = null;
      pacer.cancel(owner);
    };
  }, [message, schema]);
  if (schema === null) return null;
  const state = verdict.value?.state;
  const place = turn.candidates.length > 1 ? `Answer ${turn.candidates.indexOf(message) + 1}: ` : "";
  return (
    <>
      <span class="sr-only" role="status">
        {spoken.value && place + spoken.value}
      </span>
      {state && (
        <p class={`schema-status schema-${state}`} data-schema={state} aria-hidden={spoken.value !== ""}>
          {state === "matches" && <Check />}
          {state === "invalid" && <Close />}
          <span>{verdict.value!.text}</span>
        </p>
      )}
    </>
  );
}

const isGrowing = ({ status }: Message) => status.value === "streaming" || status.value === "waiting";
