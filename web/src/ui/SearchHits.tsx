// What a search found: titles and snippets with the words marked. A hit opens at its message.
import { splitAtMarks } from "../state/search";
import type { SearchHit, TextRange } from "../wire/rest";
import { scrollToMessage } from "./anchors";
import { moveBetweenRows, LoadMore } from "./ConversationList";
import { useChat } from "./context";
import { closeSidebarIfNarrow } from "./panels";

export function SearchHits() {
  const chat = useChat();
  const { search } = chat;
  const hits = search.hits.value.filter(({ id }) => !chat.conversations.isPendingDelete(id));
  return (
    <div class="side-scroll" onKeyDown={moveBetweenRows} aria-busy={search.state.value === "looking"}>
      {hits.length > 0 && (
        <ul class="side-list" aria-label="Found">
          {hits.map((hit) => <HitRow key={hit.id} hit={hit} />)}
        </ul>
      )}
      {search.state.value === "done" && hits.length === 0 && (
        <p class="side-empty">Nothing has these words: no title, and no message of any branch.</p>
      )}
      {search.state.value === "failed" && <p class="side-empty">The search did not work. Type on to try again.</p>}
      {search.state.value === "done" && search.hasMore.value && <LoadMore onWanted={() => search.loadMore()} />}
    </div>
  );
}

function HitRow({ hit }: { hit: SearchHit }) {
  const chat = useChat();
  const { snippet, item_id, role, title_marks } = hit.match;
  const title = hit.title || "Untitled";
  const current = chat.thread.value.id.value === hit.id;
  const open = async () => {
    closeSidebarIfNarrow();
    await chat.open(hit.id);
    if (item_id !== null && chat.thread.value.id.value === hit.id) scrollToMessage(item_id);
  };
  return (
    <li class={`side-row ${current ? "side-row-current" : ""}`} data-id={hit.id}>
      <button type="button" class="side-open side-hit" onClick={() => void open()}>
        <span class="side-title"><MarkedText text={title} marks={title_marks} /></span>
        {snippet && (
          <span class="side-snippet">
            <span class="side-who">{role === "user" ? "You" : "Answer"}: </span>
            <MarkedText text={snippet.text} marks={snippet.marks} />
          </span>
        )}
      </button>
    </li>
  );
}

function MarkedText({ text, marks }: { text: string; marks: readonly TextRange[] }) {
  return <>{splitAtMarks(text, marks).map((piece, index) => (piece.marked ? <mark key={index}>{piece.text}</mark> : piece.text))}</>;
}
