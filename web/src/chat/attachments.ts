// Files that go with a message. The server turns a file into a block of text; blocks come first in the message, so that
// the same file is found in the cache whatever is asked about it. Stored messages are taken apart again for display.

import { batch, computed, type ReadonlySignal, type Signal } from "@preact/signals";
import type { Continuation, ToolFields } from "../api/frames";
import { explainPrompt, readAttachment } from "../api/rest";
import { formatBytes, plural } from "../app/format";
import { announce, toast } from "../app/notifications";

export const MAX_FILES = 20; // of a message
export const MAX_FILE_BYTES = 16 * 1024 * 1024;
export const PASTED_FILE_CHARS = 5000; // a longer paste becomes a file
const PASTED_NAME = "Pasted text";
const CACHED_SHARE = 0.75; // the end of a file may share a page with the text after it

/** A file of a message, as its text contains it. */
export interface FileBlock {
  readonly name: string;
  readonly text: string; // of the file
  readonly block: string; // the part of the message
}

/** A file in the message box, or of a message sent by this page. */
export interface Attachment {
  readonly name: string;
  readonly bytes: number;
  readonly state: "reading" | "ready" | "failed";
  readonly pasted: string | null; // the pasted text
  readonly block: string;
  readonly tokens: number;
  readonly pages: number | null;
  readonly cachedTokens: number; // found in the cache when it was attached
  readonly error: string;
}

const BLOCK = /^File: ([^\n]+)\n(`{3,})\n/;

/** Split a message into the files at its start and the text after them. */
export function splitMessage(content: string): { readonly files: readonly FileBlock[]; readonly text: string } {
  const files: FileBlock[] = [];
  let rest = content;
  for (let head = BLOCK.exec(rest); head; head = BLOCK.exec(rest)) {
    const [{ length }, name, fence] = head as unknown as [string, string, string];
    const end = rest.indexOf(`\n${fence}\n`, length - 1);
    if (end < 0) break;
    const after = end + fence.length + 2;
    files.push({ name, text: rest.slice(length, end), block: rest.slice(0, after) });
    rest = rest.slice(after).replace(/^\n/, ""); // parts of a message are joined by a line break
  }
  return { files, text: rest };
}

export function joinMessage(files: readonly { readonly block: string }[], text: string): string {
  return [...files.map(({ block }) => block), ...(text === "" && files.length > 0 ? [] : [text])].join("\n");
}

/** A message in one line: the names of its files, and its text. */
export function describeMessage(content: string): string {
  const { files, text } = splitMessage(content);
  return [...files.map(({ name }) => `[${name}]`), text].join(" ").replace(/\s+/g, " ").trim();
}

export function isFromCache({ tokens, cachedTokens }: Attachment): boolean {
  return tokens > 0 && cachedTokens >= tokens * CACHED_SHARE;
}

/** The conversation whose message is being written. */
interface Holder {
  readonly attachments: Signal<readonly Attachment[]>;
  readonly contextTokens: ReadonlySignal<number>;
}

/** Where a message would be sent, and the system prompt and tools before it. */
export type Target = Omit<Continuation, "input"> & ToolFields & { readonly instructions?: string };

export class Attachments {
  readonly list = computed<readonly Attachment[]>(() => this.thread.value.attachments.value);
  readonly ready = computed(() => this.list.value.filter(({ state }) => state === "ready"));
  readonly isReading = computed(() => this.list.value.some(({ state }) => state === "reading"));
  readonly tokens = computed(() => this.ready.value.reduce((sum, { tokens }) => sum + tokens, 0));
  /** Tokens that the next message may have; without limit while the model is unknown. */
  readonly freeTokens = computed(() => {
    const limit = this.maxTokens();
    return limit > 0 ? limit - this.thread.value.contextTokens.value : Number.POSITIVE_INFINITY;
  });
  /** Whether the shown branch fills the context, so that nothing can follow it. */
  readonly isFull = computed(() => this.freeTokens.value <= 0);
  readonly fit = computed(() => this.tokens.value < this.freeTokens.value);
  private readonly sent = new WeakMap<object, readonly Attachment[]>();
  private queue: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly thread: ReadonlySignal<Holder>,
    private readonly target: () => Target,
    private readonly maxTokens: () => number, // of a prompt; 0: unknown
  ) {}

  /** Attach files to the message that is being written. */
  add(files: readonly File[], pasted: string | null = null): Promise<unknown> {
    const thread = this.thread.value;
    const free = MAX_FILES - thread.attachments.value.length;
    if (files.length > free) toast(`A message may have ${MAX_FILES} files.`);
    for (const file of files.slice(0, free)) {
      const entry: Attachment = { ...EMPTY, name: file.name, bytes: file.size, pasted };
      thread.attachments.value = [...thread.attachments.value, entry];
      // one after another, so that each is looked up in the cache after those before it
      this.queue = this.queue.then(() => this.read(thread, entry, file));
    }
    return this.queue;
  }

  /** Attach a long text as a file. */
  paste(text: string): void {
    const names = new Set(this.list.value.map(({ name }) => name));
    let name = `${PASTED_NAME}.txt`;
    for (let number = 2; names.has(name); number++) name = `${PASTED_NAME} ${number}.txt`;
    void this.add([new File([text], name, { type: "text/plain" })], text);
  }

  remove(attachment: Attachment): void {
    const { attachments } = this.thread.value;
    attachments.value = attachments.value.filter((other) => other !== attachment);
    announce(`Removed ${attachment.name}.`);
  }

  /** Return the files to send, and empty the list. */
  take(): readonly Attachment[] {
    const files = this.ready.value;
    this.thread.value.attachments.value = [];
    return files;
  }

  /** Remember the files of a message for as long as the page is open. */
  markSent(message: object, files: readonly Attachment[]): void {
    this.sent.set(message, files);
  }

  /** The files of a message that this page has sent; none after a reload. */
  sentWith(message: object): readonly Attachment[] {
    return this.sent.get(message) ?? [];
  }

  private async read(thread: Holder, entry: Attachment, file: File): Promise<void> {
    const isListed = () => thread.attachments.value.includes(entry);
    if (!isListed()) return; // removed meanwhile
    const done = await this.load(thread, entry, file);
    if (!isListed()) return;
    batch(() => {
      thread.attachments.value = thread.attachments.value.map((other) => (other === entry ? done : other));
      announce(done.state === "failed" ? `Not attached. ${done.error}` : `Attached ${describe(done)}.`);
    });
  }

  private async load(thread: Holder, entry: Attachment, file: File): Promise<Attachment> {
    if (file.size > MAX_FILE_BYTES) {
      return failed(entry, `${entry.name} is larger than the limit of ${formatBytes(MAX_FILE_BYTES)}`);
    }
    try {
      const read = await readAttachment(file, file.name);
      const done: Attachment = {
        ...entry,
        state: "ready",
        name: read.filename,
        block: read.text,
        tokens: read.num_tokens,
        pages: read.num_pages,
      };
      return { ...done, cachedTokens: await this.cachedTokens(thread, done) };
    } catch (error) {
      const isRefusal = error instanceof Error && "status" in error;
      const reason = isRefusal ? error.message : `${entry.name} could not be read or sent`;
      return failed(entry, reason.includes(entry.name) ? reason : `${entry.name}: ${reason}`);
    }
  }

  /** Number of tokens of a file that are in the cache, if it is sent after the files that are attached already. */
  private async cachedTokens(thread: Holder, file: Attachment): Promise<number> {
    const maxTokens = this.maxTokens();
    if (maxTokens > 0 && file.tokens >= maxTokens) return 0;
    try {
      const before = thread.attachments.value.filter(({ state }) => state === "ready");
      const content = joinMessage([...before, file], "");
      const found = await explainPrompt({ ...this.target(), input: [{ role: "user", content }] });
      const start = found.prompt_tokens - file.tokens;
      return Math.min(file.tokens, Math.max(0, found.cached_tokens - start));
    } catch {
      return 0; // the cost is then shown without the part in the cache
    }
  }
}

const EMPTY: Attachment = {
  name: "",
  bytes: 0,
  state: "reading",
  pasted: null,
  block: "",
  tokens: 0,
  pages: null,
  cachedTokens: 0,
  error: "",
};

function failed(entry: Attachment, error: string): Attachment {
  return { ...entry, state: "failed", error };
}

/** Name, size and cost in tokens. */
function describe(file: Attachment): string {
  const pages = file.pages === null ? [] : [plural(file.pages, "page")];
  const cached = isFromCache(file) ? ["in the cache"] : [];
  return [file.name, formatBytes(file.bytes), ...pages, plural(file.tokens, "token"), ...cached].join(", ");
}
