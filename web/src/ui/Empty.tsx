// An empty conversation teaches: a few things to ask, each with what it shows.
import { PRESETS, STARTERS, type StarterFeature, type Starter } from "../state/presets";
import { systemPrompt } from "../state/settings";
import { useChat } from "./context";
import { ForkDiagram } from "./Hero";
import { Again, Beams, Book, Columns, Fork, Person } from "./icons";
import { isNarrow, togglePanel } from "./panels";

const ICONS: Readonly<Record<StarterFeature, typeof Fork>> = {
  candidates: Columns, beams: Beams, fork: Fork, memory: Again, persona: Person, pages: Book,
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
    <section class="empty">
      <header class="empty-head">
        <h1>Ask once. <span class="ink-cached">Branch freely.</span></h1>
        <p class="empty-lead">
          What the model has read stays in small pages. Later turns, other answers and edited questions share them instead of
          starting over.
        </p>
        <ul class="legend-line">
          <li><i class="cell" aria-hidden="true" />was in the cache</li>
          <li><i class="cell cell-computed" aria-hidden="true" />had to be computed</li>
        </ul>
        <ForkDiagram />
      </header>
      <ul class="starters">
        {STARTERS.map((starter) => <StarterCard key={starter.title} starter={starter} onBegin={begin} />)}
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
          <span class="starter-icon"><Icon /></span>
          <span class="starter-title">{starter.title}</span>
          {starter.badge && <span class="badge">{starter.badge}</span>}
        </span>
        <span class="starter-ask">“{starter.prompt}”</span>
        <span class="starter-why">{starter.description}</span>
      </button>
    </li>
  );
}
