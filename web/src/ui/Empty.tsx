// An empty conversation teaches: a few things to ask, each with what it shows.
import { PRESETS, STARTERS, type Starter } from "../state/presets";
import { systemPrompt } from "../state/settings";
import { useChat } from "./context";

export function Empty() {
  const chat = useChat();
  const begin = (starter: Starter) => {
    const preset = PRESETS.find((other) => other.name === starter.system);
    if (preset) systemPrompt.value = preset.text;
    chat.thread.value.next.value = starter.next ?? [];
    chat.send(starter.ask, starter.sampling);
  };
  return (
    <section class="empty">
      <h1>Ask once. <span class="ink-cached">Branch freely.</span></h1>
      <p class="empty-lead">
        This chat keeps what the model has read in small pages. Later turns, other answers and edited questions share them
        instead of starting over.
      </p>
      <ul class="starters">
        {STARTERS.map((starter) => (
          <li key={starter.title}>
            <button type="button" class="starter" disabled={!chat.ready.value} onClick={() => begin(starter)}>
              <span class="starter-head">
                <span class="starter-title">{starter.title}</span>
                {(starter.sampling?.n ?? 1) > 1 && <span class="badge">{starter.sampling?.n} answers</span>}
                {starter.next && <span class="badge">2 turns</span>}
                {starter.system && <span class="badge">{starter.system}</span>}
              </span>
              <span class="starter-ask">“{starter.ask}”</span>
              <span class="starter-why">{starter.why}</span>
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}
