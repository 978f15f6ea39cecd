// Menu button with arrow keys, first-letter navigation and Escape. The first entry gets the focus through `autofocus`,
// as the popover opens, so that keys typed immediately afterwards reach the menu.
import { useSignal } from "@preact/signals";
import { type ComponentChildren, Fragment } from "preact";
import { useId, useRef } from "preact/hooks";

export interface MenuItem {
  readonly label: string;
  readonly run: () => void;
  readonly icon?: ComponentChildren;
  readonly keys?: string;
  readonly danger?: boolean;
  readonly line?: boolean; // separator above the entry
}

interface MenuProps {
  readonly label: string;
  readonly items: readonly MenuItem[];
  readonly children: ComponentChildren; // content of the button
  readonly class?: string;
  readonly note?: string | undefined; // text above the entries
}

const MARGIN_PX = 8; // of the window
const GAP_PX = 4;

export function MenuButton({ label, items, children, class: name = "tool", note }: MenuProps) {
  const id = useId();
  const open = useSignal(false); // entries are rendered only while the menu is open
  const button = useRef<HTMLButtonElement>(null);
  const menu = useRef<HTMLDivElement>(null);
  const entries = () => [...(menu.current?.querySelectorAll<HTMLButtonElement>("[role=menuitem]") ?? [])];
  const focus = (index: number) =>
    entries()
      .at(index % entries().length)
      ?.focus();

  const onToggle = () => {
    if (!open.value || !button.current || !menu.current) return;
    placeNextTo(menu.current, button.current.getBoundingClientRect());
    if (!menu.current.contains(document.activeElement)) focus(0);
  };
  const onBeforeToggle = (event: { readonly newState: string }) => {
    if (event.newState === "closed" && menu.current?.contains(document.activeElement)) button.current?.focus();
    open.value = event.newState === "open";
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const at = entries().indexOf(document.activeElement as HTMLButtonElement);
    const steps: Readonly<Record<string, number>> = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 };
    const letter = event.key.length === 1 && !event.ctrlKey && !event.metaKey && !event.altKey && event.key !== " ";
    if (event.key in steps) focus(steps[event.key]!);
    else if (event.key === "Escape" || event.key === "Tab") menu.current?.hidePopover();
    else if (letter) {
      const rest = [...entries().slice(at + 1), ...entries().slice(0, at + 1)];
      rest.find((entry) => entry.dataset.label?.toLowerCase().startsWith(event.key.toLowerCase()))?.focus();
    } else return;
    event.stopPropagation();
    if (event.key !== "Tab") event.preventDefault();
  };
  return (
    <>
      <button
        type="button"
        class={name}
        ref={button}
        aria-label={label}
        title={label}
        aria-haspopup="menu"
        aria-expanded={open.value}
        popovertarget={id}
        onKeyDown={(event) => {
          if (event.key !== "ArrowDown") return;
          event.preventDefault();
          event.stopPropagation();
          open.value = true;
          queueMicrotask(() => menu.current?.showPopover()); // after the entries are rendered
        }}
      >
        {children}
      </button>
      <div
        class="menu"
        popover="auto"
        role="menu"
        id={id}
        ref={menu}
        aria-label={label}
        onBeforeToggle={onBeforeToggle}
        onToggle={onToggle}
        onKeyDown={onKeyDown}
      >
        {open.value && note && (
          <p class="menu-note" role="presentation">
            {note}
          </p>
        )}
        {open.value &&
          items.map((item, index) => (
            <Fragment key={item.label}>
              {item.line && <hr class="menu-line" />}
              <button
                type="button"
                role="menuitem"
                tabIndex={-1}
                autofocus={index === 0}
                class={item.danger ? "menu-item menu-danger" : "menu-item"}
                data-label={item.label}
                onClick={() => {
                  menu.current?.hidePopover();
                  item.run();
                }}
              >
                {item.icon}
                <span class="spacer">{item.label}</span>
                {item.keys && <kbd aria-hidden="true">{item.keys}</kbd>}
              </button>
            </Fragment>
          ))}
      </div>
    </>
  );
}

/** Place a box of fixed position below `anchor`, or above it if there is no room; always inside the window. */
export function placeNextTo(box: HTMLElement, anchor: DOMRect): void {
  const { width, height } = box.getBoundingClientRect();
  const below = anchor.bottom + GAP_PX;
  const top = below + height + MARGIN_PX <= innerHeight ? below : anchor.top - GAP_PX - height;
  box.style.top = `${Math.max(MARGIN_PX, top)}px`;
  box.style.left = `${Math.max(MARGIN_PX, Math.min(anchor.left, innerWidth - width - MARGIN_PX))}px`;
}
