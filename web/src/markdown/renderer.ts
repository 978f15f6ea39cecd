// Everything that turns markdown into nodes: a chunk of its own, see lazy.ts.
import { makeParser } from "./parser";
import { MarkdownStream } from "./stream";

const parser = makeParser();

export function makeStream(root: HTMLElement): MarkdownStream {
  return new MarkdownStream(root, parser);
}
