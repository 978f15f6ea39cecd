// An empty panel says what it would show, and has the one button that fills it.
import type { ComponentChildren } from "preact";

interface Props {
  readonly title: string;
  readonly action?: string;
  readonly onAction?: () => void;
  readonly children: ComponentChildren;
}

export function EmptyPanel({ title, action, onAction, children }: Props) {
  return (
    <section class="teach">
      <h2>{title}</h2>
      <p>{children}</p>
      {action && <button type="button" class="button button-main" onClick={onAction}>{action}</button>}
    </section>
  );
}
