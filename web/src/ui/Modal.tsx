// A modal dialog of the browser, shown as long as it is mounted.

import type { ComponentChildren, RefObject } from "preact";
import { useLayoutEffect } from "preact/hooks";

interface ModalProps {
  readonly dialog: RefObject<HTMLDialogElement | null>;
  readonly label: string;
  readonly class?: string;
  readonly onClosed: () => void; // by the user or by `dialog.close()`, not by unmounting
  readonly onKeyDown?: (event: KeyboardEvent) => void;
  readonly onClick?: (event: MouseEvent) => void;
  readonly children: ComponentChildren;
}

export function Modal({ dialog, label, class: className = "", onClosed, children, ...handlers }: ModalProps) {
  useLayoutEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog
      class={`dialog ${className}`}
      ref={dialog}
      aria-label={label}
      // The browser reports a closed dialog late: this one may be unmounted, and another one may be shown.
      onClose={({ currentTarget }) => currentTarget.isConnected && onClosed()}
      {...handlers}
    >
      {children}
    </dialog>
  );
}
