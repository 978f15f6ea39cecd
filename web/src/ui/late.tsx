// A component that is fetched when it is first shown: the first load carries only what everybody sees.
import { signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { useEffect } from "preact/hooks";
import { toast } from "../state/toast";

export function lazy(load: () => Promise<ComponentType>): ComponentType {
  const loaded = signal<ComponentType | null>(null);
  return function Late() {
    useEffect(() => {
      if (loaded.value !== null) return;
      load().then(
        (component) => (loaded.value = component),
        () => toast("This part of the page did not load. Reload the page."),
      );
    }, []);
    const Component = loaded.value;
    return Component && <Component />;
  };
}
