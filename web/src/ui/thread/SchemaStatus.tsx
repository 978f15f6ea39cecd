// Whether an answer matches the JSON schema that it was asked for. The validator is loaded with the first such answer.

import { effect, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { SchemaVerdict } from "../../chat/schemaCheck";
import type { Message } from "../../chat/tree";
import type { Turn } from "../../chat/turn";
import { Check, Close } from "../icons";
import { pacer } from "./MessageParts";

const LABELS: Readonly<Record<SchemaVerdict["state"], string>> = {
  incomplete: "JSON incomplete, matches the schema so far",
  matches: "Matches the schema",
  invalid: "Does not match the schema.",
  unknown: "The schema cannot be checked.",
};

export function SchemaStatus({ message, turn }: { message: Message; turn: Turn }) {
  const verdict = useSignal<SchemaVerdict | null>(null);
  const schema = turn.schema.value;
  useEffect(() => {
    if (schema === null) return;
    const owner = {};
    let stop: (() => void) | null = () => {};
    void import("../../chat/schemaCheck").then(
      ({ schemaChecker }) => {
        if (stop === null) return;
        const check = schemaChecker(schema);
        stop = effect(() => {
          const text = message.text.value;
          const growing = message.status.value === "streaming" || message.status.value === "waiting";
          const show = () => (verdict.value = text === "" ? null : check(text, !growing));
          if (growing) pacer.schedule(owner, show);
          else pacer.drawNow(owner, show);
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
  if (schema === null || verdict.value === null) return null;
  const { state, problem } = verdict.value;
  return (
    <p class={`schema-status schema-${state}`} data-schema={state}>
      {state === "matches" && <Check />}
      {state === "invalid" && <Close />}
      <span>
        {LABELS[state]} {problem}
      </span>
    </p>
  );
}
