// Preact context that provides the chat to all components.

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Chat } from "../chat/chat";

export const ChatContext = createContext<Chat | null>(null);

export function useChat(): Chat {
  const chat = useContext(ChatContext);
  if (!chat) throw new Error("no chat above this component");
  return chat;
}
