// Line icons, 20 units square, in the text colour.
import type { ComponentChildren } from "preact";

function Icon({ children }: { children: ComponentChildren }) {
  return (
    <svg class="icon" viewBox="0 0 20 20" fill="none" stroke="currentColor" aria-hidden="true" focusable="false">
      {children}
    </svg>
  );
}

export const Plus = () => (
  <Icon>
    <path d="M10 4v12M4 10h12" />
  </Icon>
);
export const Minus = () => (
  <Icon>
    <path d="M4.5 10h11" />
  </Icon>
);
export const Close = () => (
  <Icon>
    <path d="m5 5 10 10M15 5 5 15" />
  </Icon>
);
export const Paperclip = () => (
  <Icon>
    <path d="m15.5 9.5-5.6 5.6a3.5 3.5 0 0 1-5-5l6.2-6.1a2.3 2.3 0 0 1 3.3 3.3l-6.2 6.1a1.2 1.2 0 0 1-1.7-1.7l5.2-5.1" />
  </Icon>
);
export const Microphone = () => (
  <Icon>
    <path d="M10 3a2.3 2.3 0 0 0-2.3 2.3v4.4a2.3 2.3 0 0 0 4.6 0V5.3A2.3 2.3 0 0 0 10 3ZM5 9.5a5 5 0 0 0 10 0M10 14.5V17" />
  </Icon>
);
export const FileText = () => (
  <Icon>
    <path d="M11.5 3H6a1 1 0 0 0-1 1v12a1 1 0 0 0 1 1h8a1 1 0 0 0 1-1V6.5zM11.5 3v3.5H15M7.5 10h5M7.5 13h5" />
  </Icon>
);
export const Send = () => (
  <Icon>
    <path d="M10 16.5v-13M4.5 9 10 3.5 15.5 9" />
  </Icon>
);
export const Queue = () => (
  <Icon>
    <path d="M3 5.5h14M3 10h14M3 14.5h6M14 12.5v4.5M11.7 14.7H16.3" />
  </Icon>
);
export const Stop = () => (
  <Icon>
    <rect x="5.5" y="5.5" width="9" height="9" rx="1.5" fill="currentColor" />
  </Icon>
);
export const Speaker = () => (
  <Icon>
    <path d="M3.5 8v4H6l4 3.5v-11L6 8zM12.5 7.5a3.5 3.5 0 0 1 0 5M14.8 5.2a6.8 6.8 0 0 1 0 9.6" />
  </Icon>
);
export const Menu = () => (
  <Icon>
    <path d="M3 6h14M3 10h14M3 14h9" />
  </Icon>
);
export const Copy = () => (
  <Icon>
    <rect x="7" y="7" width="9.5" height="9.5" rx="2" />
    <path d="M13 7V5.5a2 2 0 0 0-2-2H5.5a2 2 0 0 0-2 2V11a2 2 0 0 0 2 2H7" />
  </Icon>
);
export const Again = () => (
  <Icon>
    <path d="M16 10a6 6 0 1 1-1.9-4.4M16.2 3v3.4h-3.4" />
  </Icon>
);
export const Edit = () => (
  <Icon>
    <path d="m4 16 .8-3.4 8.3-8.3a1.6 1.6 0 0 1 2.3 0l.3.3a1.6 1.6 0 0 1 0 2.3l-8.3 8.3L4 16Z" />
  </Icon>
);
export const Left = () => (
  <Icon>
    <path d="m12 5-5 5 5 5" />
  </Icon>
);
export const Right = () => (
  <Icon>
    <path d="m8 5 5 5-5 5" />
  </Icon>
);
export const Chevron = () => (
  <Icon>
    <path d="m6.5 8.5 3.5 3.5 3.5-3.5" />
  </Icon>
);
export const Down = () => (
  <Icon>
    <path d="M10 4v12M4.5 10.5 10 16l5.5-5.5" />
  </Icon>
);
export const Check = () => (
  <Icon>
    <path d="m4 10.5 4 4 8-9" />
  </Icon>
);
export const Trash = () => (
  <Icon>
    <path d="M4 6h12M8 6V4.2h4V6M5.5 6l.7 9.8h7.6l.7-9.8" />
  </Icon>
);
export const Sliders = () => (
  <Icon>
    <path d="M3 6h7M14 6h3M3 14h3M10 14h7" />
    <circle cx="12" cy="6" r="2" />
    <circle cx="8" cy="14" r="2" />
  </Icon>
);
export const More = () => (
  <Icon>
    <path d="M5 10h.01M10 10h.01M15 10h.01" stroke-width="2.4" />
  </Icon>
);
export const Pin = () => (
  <Icon>
    <path d="M7.2 3.5h5.6l-.6 4.6 2.3 2.6H5.5l2.3-2.6-.6-4.6ZM10 10.7v5.8" />
  </Icon>
);
export const Download = () => (
  <Icon>
    <path d="M10 3.5v9M6 9l4 4 4-4M4 16.5h12" />
  </Icon>
);
export const Share = () => (
  <Icon>
    <path d="M8.5 11.5a3 3 0 0 0 4.2 0l3-3a3 3 0 0 0-4.2-4.2l-1 1M11.5 8.5a3 3 0 0 0-4.2 0l-3 3a3 3 0 0 0 4.2 4.2l1-1" />
  </Icon>
);
export const Upload = () => (
  <Icon>
    <path d="M10 13V4M6 7.5l4-4 4 4M4 16.5h12" />
  </Icon>
);
export const Spark = () => (
  <Icon>
    <path d="m10 3 1.7 4.6L16.5 10l-4.8 2.4L10 17l-1.7-4.6L3.5 10l4.8-2.4L10 3Z" />
  </Icon>
);
export const Columns = () => (
  <Icon>
    <rect x="3" y="4" width="5.5" height="12" rx="1.5" />
    <rect x="11.5" y="4" width="5.5" height="12" rx="1.5" />
  </Icon>
);
export const Widen = () => (
  <Icon>
    <path d="M7 6 3 10l4 4M13 6l4 4-4 4M3 10h14" />
  </Icon>
);
export const Fork = () => (
  <Icon>
    <circle cx="5.5" cy="4.5" r="1.8" />
    <circle cx="5.5" cy="15.5" r="1.8" />
    <circle cx="14.5" cy="8" r="1.8" />
    <path d="M5.5 6.3v7.4M14.5 9.8c0 3.4-9 1-9 3.9" />
  </Icon>
);
export const Tokens = () => (
  <Icon>
    <path d="M3 5.5h3.5M9 5.5h8M3 10h7M12.5 10H17M3 14.5h2M7.5 14.5h5M15 14.5h2" stroke-width="2.4" />
  </Icon>
);
export const Beams = () => (
  <Icon>
    <path d="M2.5 10h3c3 0 3-5 6-5h2M5.5 10h8M5.5 10c3 0 3 5 6 5h2" />
    <circle cx="16" cy="5" r="1.4" />
    <circle cx="16" cy="10" r="1.4" />
    <circle cx="16" cy="15" r="1.4" />
  </Icon>
);
export const Cells = () => (
  <Icon>
    <path d="M4 4h3v3H4zM8.5 4h3v3h-3zM13 4h3v3h-3zM4 8.5h3v3H4zM8.5 8.5h3v3h-3zM13 8.5h3v3h-3zM4 13h3v3H4zM8.5 13h3v3h-3zM13 13h3v3h-3z" />
  </Icon>
);
export const PanelRight = () => (
  <Icon>
    <rect x="3" y="4" width="14" height="12" rx="2" />
    <path d="M11.5 4v12" />
  </Icon>
);
export const Person = () => (
  <Icon>
    <circle cx="10" cy="6.5" r="3" />
    <path d="M4 16.5c.6-3.2 3-4.8 6-4.8s5.4 1.6 6 4.8" />
  </Icon>
);
export const Book = () => (
  <Icon>
    <path d="M10 5.2C8.3 4 6.2 3.7 3.5 3.8v11c2.7-.1 4.8.2 6.5 1.4 1.7-1.2 3.8-1.5 6.5-1.4v-11c-2.7-.1-4.8.2-6.5 1.4ZM10 5.2v11" />
  </Icon>
);
export const Sun = () => (
  <Icon>
    <circle cx="10" cy="10" r="3.4" />
    <path d="M10 2.5v1.6M10 15.9v1.6M2.5 10h1.6M15.9 10h1.6M4.7 4.7l1.1 1.1M14.2 14.2l1.1 1.1M15.3 4.7l-1.1 1.1M5.8 14.2l-1.1 1.1" />
  </Icon>
);
export const Moon = () => (
  <Icon>
    <path d="M16 11.8A6.5 6.5 0 0 1 8.2 4a6.5 6.5 0 1 0 7.8 7.8Z" />
  </Icon>
);
export const Screen = () => (
  <Icon>
    <rect x="3" y="4" width="14" height="9.5" rx="1.5" />
    <path d="M7 16.5h6" />
  </Icon>
);
export const Keyboard = () => (
  <Icon>
    <rect x="2.5" y="5" width="15" height="10" rx="2" />
    <path d="M5.5 8h.01M8.5 8h.01M11.5 8h.01M14.5 8h.01M6.5 12h7" />
  </Icon>
);

/** Logo: KV pages in a column, one of them forked off. */
export const Mark = () => (
  <svg class="mark" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
    <rect x="3" y="2.5" width="8" height="5" rx="1.4" />
    <rect x="3" y="9.5" width="8" height="5" rx="1.4" />
    <rect x="3" y="16.5" width="8" height="5" rx="1.4" />
    <rect class="mark-fork" x="14" y="16.5" width="7" height="5" rx="1.4" />
    <path d="M11 12h2.8a3.4 3.4 0 0 1 3.4 3.4v1.1" fill="none" stroke-width="1.6" />
  </svg>
);
