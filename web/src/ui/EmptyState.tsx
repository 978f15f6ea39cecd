// Empty states: the start page with conversation starters, and panels without content.

import type { ComponentChildren } from "preact";
import { PRESETS } from "../app/prompts";
import { type Sampling, systemPrompt } from "../app/settings";
import { useChat } from "./context";
import { Again, Beams, Book, Columns, Fork, Person } from "./icons";
import { isNarrow, togglePanel } from "./navigation";

const ICONS: Readonly<Record<StarterFeature, typeof Fork>> = {
  candidates: Columns,
  beams: Beams,
  fork: Fork,
  memory: Again,
  persona: Person,
  pages: Book,
};

export function EmptyState() {
  const chat = useChat();
  const begin = (starter: Starter) => {
    const preset = PRESETS.find((other) => other.name === starter.system);
    if (preset) systemPrompt.value = preset.text;
    chat.thread.value.suggestions.value = starter.followUps ?? [];
    if (starter.panel && !isNarrow()) togglePanel(starter.panel, true);
    chat.send(starter.prompt, starter.sampling);
  };
  return (
    <section class="empty-state">
      <header class="empty-state-head">
        <h1>
          Ask once. <span class="ink-cached">Branch freely.</span>
        </h1>
        <p class="empty-state-lead">
          Processed tokens stay in the KV cache, in small pages. Later turns, other answers and edited messages share
          the pages instead of computing them again.
        </p>
        <ul class="legend-line">
          <li>
            <i class="cell" aria-hidden="true" />
            cached
          </li>
          <li>
            <i class="cell cell-computed" aria-hidden="true" />
            computed
          </li>
        </ul>
        <ForkDiagram />
      </header>
      <ul class="starters">
        {STARTERS.map((starter) => (
          <StarterCard key={starter.title} starter={starter} onBegin={begin} />
        ))}
      </ul>
    </section>
  );
}

function StarterCard({ starter, onBegin }: { starter: Starter; onBegin: (starter: Starter) => void }) {
  const Icon = ICONS[starter.feature];
  return (
    <li>
      <button type="button" class="starter" disabled={!useChat().ready.value} onClick={() => onBegin(starter)}>
        <span class="starter-head">
          <span class="starter-icon">
            <Icon />
          </span>
          <span class="starter-title">{starter.title}</span>
          {starter.badge && <span class="badge">{starter.badge}</span>}
        </span>
        <span class="starter-prompt">“{starter.prompt}”</span>
        <span class="starter-description">{starter.description}</span>
      </button>
    </li>
  );
}

const DIAGRAM_CELL = { width: 9, height: 18, step: 13 };
const TRUNK_CELLS = 7; // cells of the prompt
const ANSWER_CELLS = [4, 6, 5]; // new cells of each answer
const ROW_Y = [13, 46, 79];
const FORK_X = TRUNK_CELLS * DIAGRAM_CELL.step;
const ANSWER_X = FORK_X + 40;

function ForkDiagram() {
  const trunk = ROW_Y[1]!;
  return (
    <svg
      class="diagram"
      viewBox="0 0 226 108"
      role="img"
      aria-label="One prompt, computed once; three answers share its KV pages"
    >
      {ROW_Y.map((y) => (
        <path
          key={y}
          class="diagram-line"
          pathLength="1"
          d={`M${FORK_X} ${trunk}c20 0 16 ${y - trunk} 36 ${y - trunk}`}
        />
      ))}
      {Array.from({ length: TRUNK_CELLS }, (_, index) => (
        <rect
          key={index}
          class={`diagram-cell diagram-${index}`}
          x={index * DIAGRAM_CELL.step}
          y={trunk - 9}
          width={DIAGRAM_CELL.width}
          height={DIAGRAM_CELL.height}
          rx="2.5"
        />
      ))}
      {ANSWER_CELLS.map((count, row) =>
        Array.from({ length: count }, (_, index) => (
          <rect
            key={`${row} ${index}`}
            class={`diagram-cell diagram-new diagram-${TRUNK_CELLS + 2 * index + row}`}
            x={ANSWER_X + index * DIAGRAM_CELL.step + 0.75}
            y={ROW_Y[row]! - 8.25}
            width={DIAGRAM_CELL.width - 1.5}
            height={DIAGRAM_CELL.height - 1.5}
            rx="2"
          />
        )),
      )}
    </svg>
  );
}

type StarterFeature = "candidates" | "beams" | "fork" | "memory" | "persona" | "pages";

interface Starter {
  readonly title: string;
  readonly feature: StarterFeature;
  readonly badge?: string;
  readonly prompt: string;
  readonly description: string;
  readonly sampling?: Partial<Sampling>;
  readonly system?: string;
  readonly followUps?: readonly string[];
  readonly panel?: "beams" | "pages"; // panel to open with the answer
}

const SINGLE_ANSWER: Partial<Sampling> = { search: "sample", n: 1 };

const STARTERS: readonly Starter[] = [
  {
    title: "Four stories",
    feature: "candidates",
    badge: "4 answers",
    prompt: "Tell me a story about a dragon",
    description: "The prompt is computed once and shared by four answers. Pick one.",
    sampling: { search: "sample", n: 4, temperature: 1 },
  },
  {
    title: "Beam search",
    feature: "beams",
    badge: "5 beams",
    prompt: "Tell me a story about a robot",
    description: "Beam search extends several texts at once. Text that all beams share is solid, the rest is grey.",
    sampling: { search: "beam", n: 5 },
    panel: "beams",
  },
  {
    title: "Fork at a word",
    feature: "fork",
    prompt: "Tell me a story about a fox",
    description: "Then click a word to see its alternatives and their probabilities, and to branch from one.",
    sampling: SINGLE_ANSWER,
  },
  {
    title: "Remember me",
    feature: "memory",
    badge: "2 turns",
    prompt: "My name is Ada.",
    description: "Then ask for it. The second turn reuses the KV pages of the first: see the cells below the answer.",
    sampling: SINGLE_ANSWER,
    followUps: ["What is my name?"],
  },
  {
    title: "Talk like a pirate",
    feature: "persona",
    badge: "Pirate",
    prompt: "Who are you?",
    description: "All chats with the same system prompt share its KV pages.",
    sampling: SINGLE_ANSWER,
    system: "Pirate",
  },
  {
    title: "Under the hood",
    feature: "pages",
    prompt: "What is a KV page?",
    description: "The main idea of this server, with the map of all KV pages next to the answer.",
    sampling: SINGLE_ANSWER,
    panel: "pages",
  },
];

// Placeholder of an empty panel: describes the content, with a button that produces some.

interface Props {
  readonly title: string;
  readonly action?: string;
  readonly onAction?: () => void;
  readonly children: ComponentChildren;
}

export function EmptyPanel({ title, action, onAction, children }: Props) {
  return (
    <section class="empty-panel">
      <h2>{title}</h2>
      <p>{children}</p>
      {action && (
        <button type="button" class="button button-main" onClick={onAction}>
          {action}
        </button>
      )}
    </section>
  );
}
