// Reads a JSON text that may not have ended yet.

export interface JsonPrefix {
  readonly value: unknown; // what is known of it; a number or word that has not ended is left out
  readonly open: readonly (readonly string[])[]; // paths of the values that have not ended; none: the text is complete
}

/** Read the beginning of a JSON text. Raises: SyntaxError if no more text can make JSON of it. */
export function readPrefix(text: string): JsonPrefix {
  const reader = new PrefixReader(text);
  const value = reader.value([]);
  if (reader.open.length === 0) reader.expectEnd();
  return { value, open: reader.open };
}

const WHITESPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\d.eE+-])/y;
const NUMBER_PREFIX = /-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?$/y;
// biome-ignore lint/suspicious/noControlCharactersInRegex: JSON excludes control characters from strings
const STRING_PREFIX = /"(?:[^"\\\u0000-\u001f]+|\\["\\/bfnrt]|\\u[\da-fA-F]{4})*/y;
const ESCAPE_PREFIX = /\\(?:u[\da-fA-F]{0,3})?$/y;
const WORDS = [
  ["true", true],
  ["false", false],
  ["null", null],
] as const;

class PrefixReader {
  readonly open: string[][] = [];
  private at = 0;

  constructor(private readonly text: string) {}

  /** Read a value; undefined if nothing is known of it. */
  value(path: string[]): unknown {
    const first = this.peek();
    if (first === "") return this.leave(path, undefined);
    if (first === "{") return this.object(path);
    if (first === "[") return this.array(path);
    if (first === '"') return this.string(path);
    const word = WORDS.find(([name]) => name[0] === first);
    return word ? this.word(path, word) : this.number(path);
  }

  expectEnd(): void {
    if (this.peek() !== "") this.refuse();
  }

  private object(path: string[]): unknown {
    const entries: [string, unknown][] = [];
    const read = () => Object.fromEntries(entries); // defines "__proto__" as any other key
    this.at++;
    if (this.take("}")) return read();
    for (;;) {
      const quote = this.peek();
      if (quote !== "" && quote !== '"') this.refuse();
      const key = quote === "" ? this.leave(path, "") : this.string(path);
      if (this.open.length > 0 || this.peek() === "") return this.leave(path, read());
      if (!this.take(":")) this.refuse();
      const value = this.value([...path, key]);
      if (value !== undefined) entries.push([key, value]);
      if (this.open.length > 0 || this.peek() === "") return this.leave(path, read());
      if (this.take("}")) return read();
      if (!this.take(",")) this.refuse();
    }
  }

  private array(path: string[]): unknown {
    const items: unknown[] = [];
    this.at++;
    if (this.take("]")) return items;
    for (;;) {
      const item = this.value([...path, `${items.length}`]);
      if (item !== undefined) items.push(item);
      if (this.open.length > 0 || this.peek() === "") return this.leave(path, items);
      if (this.take("]")) return items;
      if (!this.take(",")) this.refuse();
    }
  }

  private string(path: string[]): string {
    const start = this.at;
    this.at += this.match(STRING_PREFIX)!.length;
    const read = this.text.slice(start, this.at);
    if (this.text[this.at] === '"') {
      this.at++;
      return JSON.parse(`${read}"`) as string;
    }
    if (this.at < this.text.length && this.match(ESCAPE_PREFIX) === null) this.refuse();
    return this.leave(path, JSON.parse(`${read}"`) as string);
  }

  private number(path: string[]): unknown {
    const number = this.match(NUMBER);
    if (number !== null && this.at + number.length < this.text.length) {
      this.at += number.length;
      return Number(number);
    }
    if (this.match(NUMBER_PREFIX) === null) this.refuse();
    return this.leave(path, undefined);
  }

  private word(path: string[], [name, value]: (typeof WORDS)[number]): unknown {
    const rest = this.text.slice(this.at, this.at + name.length);
    if (!name.startsWith(rest)) this.refuse();
    if (rest !== name) return this.leave(path, undefined);
    this.at += name.length;
    return value;
  }

  /** The text ends within the value at `path`. */
  private leave<Value>(path: string[], value: Value): Value {
    this.open.unshift(path);
    return value;
  }

  private peek(): string {
    this.at += this.match(WHITESPACE)!.length;
    return this.text[this.at] ?? "";
  }

  private take(expected: string): boolean {
    if (this.peek() !== expected) return false;
    this.at++;
    return true;
  }

  private match(pattern: RegExp): string | null {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text)?.[0] ?? null;
  }

  private refuse(): never {
    throw new SyntaxError(`character ${this.at + 1} is not expected in JSON`);
  }
}
