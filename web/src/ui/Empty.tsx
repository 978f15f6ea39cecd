// An empty conversation teaches: a few things to ask, each with what it shows.
import { PRESETS, STARTERS, type Shows, type Starter } from "../state/presets";
import { systemPrompt } from "../state/settings";
import { useChat } from "./context";
import { Hero } from "./Hero";
import { Again, Beams, Book, Columns, Fork, Person } from "./icons";
import { isNarrow, togglePanel } from "./panels";

const ICONS: Readonly<Record<Shows, typeof Fork>> = {
  candidates: Columns, beams: Beams, fork: Fork, memory: Again, persona: Person, pages: Book,
};

export function Empty() {
  const chat = useChat();
  const begin = (starter: Starter) => {
    const preset = PRESETS.find((other) => other.name === starter.system);
    if (preset) systemPrompt.value = preset.text;
    chat.thread.value.next.value = starter.next ?? [];
    if (starter.panel && !isNarrow()) togglePanel(starter.panel, true);
    chat.send(starter.ask, starter.sampling);
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
        <Hero />
      </header>
      <ul class="starters">
        {STARTERS.map((starter) => <Card key={starter.title} starter={starter} onBegin={begin} />)}
      </ul>
    </section>
  );
}

function Card({ starter, onBegin }: { starter: Starter; onBegin: (starter: Starter) => void }) {
  const Icon = ICONS[starter.shows];
  return (
    <li>
      <button type="button" class="starter" disabled={!useChat().ready.value} onClick={() => onBegin(starter)}>
        <span class="starter-head">
          <span class="starter-icon"><Icon /></span>
          <span class="starter-title">{starter.title}</span>
          {starter.badge && <span class="badge">{starter.badge}</span>}
        </span>
        <span class="starter-ask">“{starter.ask}”</span>
        <span class="starter-why">{starter.why}</span>
      </button>
    </li>
  );
}
