// What stands between the reader and the server, when something does.
import { useChat } from "./context";

export function Banner() {
  const chat = useChat();
  const state = chat.socket.state.value;
  if (state === "refused") {
    return (
      <div class="banner" role="alert">
        The server refused this page. It may want an API key or another address.
        <button type="button" class="button" onClick={() => location.reload()}>Reload</button>
      </div>
    );
  }
  if (state !== "lost") return null;
  return (
    <div class="banner" role="alert">
      The connection is lost. Your conversation is stored; the page reconnects by itself.
      <button type="button" class="button" onClick={() => chat.socket.retryNow()}>Try now</button>
    </div>
  );
}
