// What the server is doing before the first token: three cells that fill, and a word.
import type { Turn } from "../state/turn";

const PHASE_LABELS = { queued: "Waiting for the server", prefill: "Reading", decode: "Writing", ended: "" } as const;

export function Pending({ turn }: { turn: Turn | undefined }) {
  const phase = turn?.phase.value ?? "queued";
  return (
    <p class="waiting">
      <span class="waiting-cells" aria-hidden="true"><i /><i /><i /></span>
      {turn?.beams && phase === "decode" ? "Searching" : PHASE_LABELS[phase]}
    </p>
  );
}
