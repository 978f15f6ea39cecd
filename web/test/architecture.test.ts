import { describe, expect, test } from "vitest";

// Folder of src -> folders that it may import. An import of a type counts too.
const LAYERS: Readonly<Record<string, readonly string[]>> = {
  app: [],
  api: [],
  conversations: ["api", "app"],
  server: ["api", "app", "conversations"],
  chat: ["api", "app", "conversations", "server"],
  markdown: ["app"],
  draw: ["app", "chat"],
  ui: ["api", "app", "chat", "conversations", "draw", "markdown", "server"],
};
const TYPES_ONLY = [["draw", "chat"]]; // layouts are computed from plain data
const ENTRY = "main.tsx"; // connects the layers
const COMPONENT_PACKAGES = /^(preact|preact\/hooks)$/; // only components import these
const MAX_SOURCE_LINES = 400;
const MAX_STYLE_LINES = 500;

type Sources = Readonly<Record<string, string>>; // path below src -> text

interface Import {
  readonly specifier: string;
  readonly target: string | null; // path below src; null: a package, a style sheet, or a missing file
  readonly typeOnly: boolean;
}

// `import ... from "x"`, `import "x"`, `export ... from "x"` at the start of a line, and `import("x")` anywhere.
const IMPORT =
  /(?:^import(\s+type\b)?(?:\s[^"';()]*?\bfrom)?|^export(\s+type\b)?\s[^"';()=]*?\bfrom|\bimport\()\s*"([^"]+)"/gm;

function importsOf(path: string, sources: Sources): readonly Import[] {
  return [...sources[path]!.matchAll(IMPORT)].map(([, importType, exportType, specifier]) => ({
    specifier: specifier!,
    target: specifier!.startsWith(".") ? resolve(path, specifier!, sources) : null,
    typeOnly: (importType ?? exportType) !== undefined,
  }));
}

function resolve(path: string, specifier: string, sources: Sources): string | null {
  const base = new URL(specifier, `file:///${path}`).pathname.slice(1);
  return [`${base}.ts`, `${base}.tsx`].find((candidate) => candidate in sources) ?? null;
}

const folderOf = (path: string) => (path.includes("/") ? path.slice(0, path.indexOf("/")) : "");

function violations(sources: Sources): readonly string[] {
  return [...layerViolations(sources), ...cycles(sources), ...sizeViolations(sources)];
}

function layerViolations(sources: Sources): readonly string[] {
  const found: string[] = [];
  for (const path of scriptsOf(sources)) {
    if (path === ENTRY) continue;
    const folder = folderOf(path);
    const allowed = LAYERS[folder];
    if (!allowed) {
      found.push(`${path}: folder without a layer`);
      continue;
    }
    for (const { specifier, target, typeOnly } of importsOf(path, sources)) {
      if (COMPONENT_PACKAGES.test(specifier) && folder !== "ui") found.push(`${path}: imports ${specifier}`);
      if (specifier.startsWith(".") && !specifier.endsWith(".css") && target === null) {
        found.push(`${path}: cannot resolve ${specifier}`);
      }
      if (target === null || folderOf(target) === folder) continue;
      if (!allowed.includes(folderOf(target))) found.push(`${path}: imports ${target}`);
      const needsType = TYPES_ONLY.some(([from, to]) => from === folder && to === folderOf(target));
      if (needsType && !typeOnly) found.push(`${path}: imports more than types of ${target}`);
    }
  }
  return found;
}

/** Report each strongly connected component of more than one file (depth-first search from every file). */
function cycles(sources: Sources): readonly string[] {
  const targets = new Map(
    scriptsOf(sources).map((path) => [path, importsOf(path, sources).flatMap(({ target }) => target ?? [])]),
  );
  const reachable = (from: string): ReadonlySet<string> => {
    const seen = new Set<string>();
    const stack = [...(targets.get(from) ?? [])];
    for (let path = stack.pop(); path !== undefined; path = stack.pop()) {
      if (seen.has(path)) continue;
      seen.add(path);
      stack.push(...(targets.get(path) ?? []));
    }
    return seen;
  };
  const inCycle = [...targets.keys()].filter((path) => reachable(path).has(path));
  return inCycle.length > 0 ? [`import cycle: ${inCycle.sort().join(", ")}`] : [];
}

function sizeViolations(sources: Sources): readonly string[] {
  return Object.entries(sources).flatMap(([path, text]) => {
    const lines = text.split("\n").length;
    const limit = path.endsWith(".css") ? MAX_STYLE_LINES : MAX_SOURCE_LINES;
    return lines > limit ? [`${path}: ${lines} lines, maximum ${limit}`] : [];
  });
}

const scriptsOf = (sources: Sources) => Object.keys(sources).filter((path) => !path.endsWith(".css"));

const raw = import.meta.glob<string>("../src/**/*.{ts,tsx,css}", { query: "?raw", import: "default", eager: true });
const SOURCES: Sources = Object.fromEntries(
  Object.entries(raw).map(([path, text]) => [path.replace("../src/", ""), text]),
);

describe("architecture of src", () => {
  test("the sources are read, style sheets too", () => {
    expect(Object.keys(SOURCES).filter((path) => SOURCES[path]!.trim() === "")).toEqual([]);
  });

  test("the sources follow the layers, have no import cycle, and stay below the size limits", () => {
    expect(Object.keys(SOURCES).length).toBeGreaterThan(50);
    expect(violations(SOURCES)).toEqual([]);
  });

  test("every layer exists, so that a renamed folder does not escape its rule", () => {
    expect(new Set(scriptsOf(SOURCES).map(folderOf))).toEqual(new Set(["", ...Object.keys(LAYERS)]));
  });

  test("every import of the sources is recognised", () => {
    for (const path of scriptsOf(SOURCES)) {
      const statements = SOURCES[path]!.match(/^import\b|\bimport\(/gm) ?? [];
      expect(importsOf(path, SOURCES).length, path).toBe(statements.length);
    }
  });
});

describe("architecture check", () => {
  const ok = { "api/rest.ts": "", "chat/turn.ts": 'import { call } from "../api/rest";\n', "ui/App.tsx": "" };

  test("accepts an allowed import", () => expect(violations(ok)).toEqual([]));

  test.each<[string, Sources, string]>([
    [
      "an import of a component",
      { ...ok, "chat/a.ts": 'import { App } from "../ui/App";' },
      "chat/a.ts: imports ui/App.tsx",
    ],
    [
      "an upward type import",
      { ...ok, "api/a.ts": 'import type { Turn } from "../chat/turn";' },
      "api/a.ts: imports chat/turn.ts",
    ],
    ["an upward dynamic import", { ...ok, "api/a.ts": 'await import("../ui/App");' }, "api/a.ts: imports ui/App.tsx"],
    [
      "hooks in logic",
      { ...ok, "chat/a.ts": 'import { useRef } from "preact/hooks";' },
      "chat/a.ts: imports preact/hooks",
    ],
    [
      "values of plain data",
      { ...ok, "draw/a.ts": 'import { turn } from "../chat/turn";' },
      "draw/a.ts: imports more than types of chat/turn.ts",
    ],
    ["an unknown folder", { ...ok, "misc/a.ts": "" }, "misc/a.ts: folder without a layer"],
    ["a missing file", { ...ok, "api/a.ts": 'import "./gone";' }, "api/a.ts: cannot resolve ./gone"],
    [
      "a type-only cycle",
      { ...ok, "api/a.ts": 'import type { B } from "./b";', "api/b.ts": 'export type { A } from "./a";' },
      "import cycle: api/a.ts, api/b.ts",
    ],
    ["a long file", { ...ok, "api/a.ts": "\n".repeat(MAX_SOURCE_LINES) }, "api/a.ts: 401 lines, maximum 400"],
    [
      "a long style sheet",
      { ...ok, "styles/a.css": "\n".repeat(MAX_STYLE_LINES) },
      "styles/a.css: 501 lines, maximum 500",
    ],
  ])("reports %s", (_, sources, message) => expect(violations(sources)).toEqual([message]));
});
