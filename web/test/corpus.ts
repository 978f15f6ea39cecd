// Texts with active content. Rendered output must contain only inert text. tests/e2e reads the same file.
import corpus from "./corpus.json";

export const XSS: readonly string[] = corpus;
