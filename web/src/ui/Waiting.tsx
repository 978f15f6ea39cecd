// What the server is doing before the first token: three cells that fill, and a word.
import type { Turn } from "../state/turn";

const WORDS = { queued: "Waiting for the server", prefill: "Reading", decode: "Writing", ended: "" } as const;

export function Waiting({ turn }: { turn: Turn | undefined }) {
  const phase = turn?.phase.value ?? "queued";
  return (
    <p class="waiting">
      <span class="waiting-cells" aria-hidden="true"><i /><i /><i /></span>
      {turn?.beams && phase === "decode" ? "Searching" : WORDS[phase]}
    </p>
  );
}
