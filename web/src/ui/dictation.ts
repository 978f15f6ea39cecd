// Dictation by the browser's own speech recognition. The page gets texts only: it neither reads nor sends audio.

/** The part of the browser's SpeechRecognition that is used. */
interface Recognition extends EventTarget {
  lang: string;
  continuous: boolean;
  interimResults: boolean;
  processLocally?: boolean;
  onresult: ((event: RecognitionEvent) => void) | null;
  onerror: ((event: { readonly error: string }) => void) | null;
  onend: (() => void) | null;
  start(): void;
  stop(): void;
  abort(): void;
}

interface RecognitionEvent {
  readonly resultIndex: number;
  readonly results: ArrayLike<ArrayLike<{ readonly transcript: string }> & { readonly isFinal: boolean }>;
}

interface RecognitionClass {
  new (): Recognition;
  available?(options: { langs: readonly string[]; processLocally: boolean }): Promise<string>;
}

const ERRORS: Readonly<Record<string, string>> = {
  "audio-capture": "No microphone was found.",
  "language-not-supported": "The browser does not recognise speech in your language.",
  network: "The browser did not reach its speech service.",
  "not-allowed": "The browser does not allow this page to use the microphone.",
  "service-not-allowed": "The browser does not allow speech recognition on this page.",
};

export interface Dictation {
  /** Finish the phrase that is spoken. */
  stop(): void;
  /** Leave out the phrase that is spoken. */
  abort(): void;
}

interface Listener {
  /** A phrase was recognised. */
  readonly onPhrase: (text: string) => void;
  /** Words of a phrase that is still spoken, which may change; "" when it has ended. */
  readonly onInterim: (text: string) => void;
  /** The dictation is over. `error`: for the user; null if it was ended on purpose or by silence. */
  readonly onEnd: (error: string | null) => void;
}

/** Listen to phrases in the browser's language, on this device if it can. */
export async function dictate(Recogniser: RecognitionClass, listener: Listener): Promise<Dictation> {
  const lang = navigator.language;
  const local = await Recogniser.available?.({ langs: [lang], processLocally: true }).catch(() => "");
  const recognition = new Recogniser();
  recognition.lang = lang;
  recognition.continuous = true;
  recognition.interimResults = true;
  if (local === "available") recognition.processLocally = true;
  let error: string | null = null;
  recognition.onresult = ({ resultIndex, results }) => {
    let interim = "";
    for (const result of Array.from(results).slice(resultIndex)) {
      const text = result[0]?.transcript ?? "";
      if (!result.isFinal) interim += text;
      else if (text.trim() !== "") listener.onPhrase(text.trim());
    }
    listener.onInterim(interim.trim());
  };
  recognition.onerror = (event) => {
    if (event.error !== "no-speech" && event.error !== "aborted") error = ERRORS[event.error] ?? "Dictation failed.";
  };
  recognition.onend = () => listener.onEnd(error);
  recognition.start();
  return recognition;
}

/** Insert a phrase at the cursor, in place of the selected text, with spaces to its neighbours. */
export function insertPhrase(area: HTMLTextAreaElement, phrase: string): void {
  const { selectionStart: start, selectionEnd: end, value } = area;
  const before = /\S$/.test(value.slice(0, start)) ? " " : "";
  const after = /^\S/.test(value.slice(end)) ? " " : "";
  area.setRangeText(before + phrase + after, start, end, "end");
  area.dispatchEvent(new Event("input", { bubbles: true }));
}
