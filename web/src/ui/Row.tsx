// One message of the thread, in whatever form it has now: said, answered, or still to be picked from candidates.
import type { Message } from "../state/tree";
import { Answer } from "./Answer";
import { Candidates } from "./Candidates";
import { useChat } from "./context";
import { LiveBeams } from "./LiveBeams";
import { UserMessage } from "./UserMessage";

export function MessageRow({ message }: { message: Message }) {
  const chat = useChat();
  const thread = chat.thread.value;
  if (message.role === "user") {
    const unanswered = thread.tree.value.leaf.value === message && thread.live.value === null && !thread.awaitingServer.value;
    return (
      <>
        <UserMessage message={message} />
        {unanswered && (
          <div class="ending">
            <span>No answer is stored.</span>
            <button type="button" class="button" onClick={() => chat.answer(message)}>Answer</button>
          </div>
        )}
      </>
    );
  }
  const turn = thread.turnOf(message);
  if (turn?.live && (turn.beams || turn.beamTree.value)) return <LiveBeams turn={turn} />;
  if (turn && turn.showsCandidates.value && turn.candidates.length > 1) return <Candidates turn={turn} chosen={message} />;
  return <Answer message={message} turn={turn} />;
}
