// Texts that try to act. Whoever renders them must end with text and nothing else. tests/e2e reads the same file.
import corpus from "./corpus.json";

export const XSS: readonly string[] = corpus;
