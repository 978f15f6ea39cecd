// What giving up one candidate gave back.
import type { StopReceipt } from "../wire/frames";
import { plural } from "./Figures";

export function DroppedNote({ receipt }: { receipt: StopReceipt }) {
  return (
    <p class="ending" data-dropped={receipt.pages_freed}>
      Dropped: {plural(receipt.pages_freed, "page")} returned, {plural(receipt.tokens_after_stop, "token")} after.
    </p>
  );
}
