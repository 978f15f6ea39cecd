// Slows a signal down to what is worth drawing.
import { type ReadonlySignal, effect, signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";

/** A signal that follows `source`, at once after a quiet time and then once per `everyMs`. */
export function useThrottled<T>(source: ReadonlySignal<T>, everyMs: number): ReadonlySignal<T> {
  const shown = useMemo(() => signal(source.peek()), [source]);
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const stop = effect(() => {
      void source.value;
      if (timer !== undefined) return;
      shown.value = source.peek();
      timer = setTimeout(() => {
        timer = undefined;
        shown.value = source.peek();
      }, everyMs);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [source]);
  return shown;
}
