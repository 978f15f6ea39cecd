// Voice input: the browser turns speech into text at the cursor of the message box. Hidden in browsers without it.

import { useSignal } from "@preact/signals";
import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { announce, toast } from "../app/notifications";
import { useChat } from "./context";
import type { Dictation } from "./dictation";
import { Microphone } from "./icons";

const TITLE =
  "Voice input. The browser recognises the speech; some browsers send it to their maker's service for that.";

export function VoiceButton({ area }: { area: RefObject<HTMLTextAreaElement | null> }) {
  const chat = useChat();
  const listening = useSignal(false);
  const interim = useSignal(""); // recognised so far of the phrase that is spoken: not part of the message yet
  const dictation = useRef<Dictation | null>(null);
  const attempt = useRef({}); // replaced when listening ends, so that a late start is not kept
  const abort = () => {
    attempt.current = {};
    dictation.current?.abort();
    dictation.current = null;
    listening.value = false;
    interim.value = "";
  };
  const isEmpty = chat.prefill.text.value === ""; // the message was sent
  useEffect(() => {
    if (isEmpty) abort();
  }, [isEmpty]);
  useEffect(() => abort, [chat.thread.value]);
  const Recogniser = recogniser();
  if (!Recogniser) return null;

  const start = async () => {
    const own = {};
    attempt.current = own;
    listening.value = true;
    const isCurrent = () => attempt.current === own;
    try {
      const { dictate, insertPhrase } = await import("./dictation");
      if (!isCurrent()) return;
      const started = await dictate(Recogniser, {
        onPhrase: (phrase) => isCurrent() && area.current && insertPhrase(area.current, phrase),
        onInterim: (words) => {
          if (isCurrent()) interim.value = words;
        },
        onEnd: (error) => {
          if (!isCurrent()) return;
          abort();
          if (error === null) announce("Voice input ended.");
          else toast(error);
        },
      });
      if (!isCurrent()) return started.abort();
      dictation.current = started;
      announce("Listening.");
    } catch {
      if (!isCurrent()) return;
      abort();
      toast("Voice input did not start.");
    }
  };
  const onClick = () => {
    if (!listening.value) void start();
    else if (dictation.current) dictation.current.stop();
    else abort();
    area.current?.focus();
  };
  return (
    <>
      <button
        type="button"
        class="chip voice"
        aria-label={listening.value ? "Stop voice input" : "Voice input"}
        aria-pressed={listening.value}
        title={TITLE}
        onClick={onClick}
      >
        <Microphone />
      </button>
      {interim.value !== "" && (
        <p class="voice-interim" dir="auto" title="Recognised so far: the phrase is added when it is complete">
          {interim.value}
        </p>
      )}
    </>
  );
}

type Recognition = Parameters<typeof import("./dictation").dictate>[0];

function recogniser(): Recognition | undefined {
  const names = window as { SpeechRecognition?: Recognition; webkitSpeechRecognition?: Recognition };
  return names.SpeechRecognition ?? names.webkitSpeechRecognition;
}
