// Components that are loaded when they are first shown.

import { signal } from "@preact/signals";
import type { ComponentType, JSX } from "preact";
import { useEffect } from "preact/hooks";
import { NOT_LOADED, toast } from "../app/notifications";

/** Load a component when it is first shown. After a failure, which calls `failed`, showing it again retries. */
export function lazy<Props extends object = object>(
  load: () => Promise<ComponentType<Props>>,
  loading: JSX.Element | null = null,
  failed = () => {},
): ComponentType<Props> {
  const loaded = signal<ComponentType<Props> | null>(null);
  return function LazyComponent(props: Props) {
    useEffect(() => {
      if (loaded.value !== null) return;
      load().then(
        (component) => (loaded.value = component),
        () => {
          failed();
          toast(NOT_LOADED);
        },
      );
    }, []);
    const Component = loaded.value;
    return Component ? <Component {...props} /> : loading;
  };
}
