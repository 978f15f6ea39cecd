// Copies a text and says so for a moment.
import { useSignal } from "@preact/signals";
import { copyText } from "../markdown/clipboard";
import { Check, Copy } from "./icons";

export function CopyButton({ text, label = "Copy" }: { text: () => string; label?: string }) {
  const copied = useSignal(false);
  const copy = async () => {
    copied.value = await copyText(text());
    setTimeout(() => (copied.value = false), 1600);
  };
  return (
    <button type="button" class="tool" aria-label={copied.value ? "Copied" : label} title={label} onClick={() => void copy()}>
      {copied.value ? <Check /> : <Copy />}
    </button>
  );
}
