// Builds the page into the Python package. URLs are relative, so that it works below a path prefix.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
const OF_DEPENDENCIES = ["@preact/signals-core", "linkify-it", "mdurl", "uc.micro", "punycode.js"];
const SHIPPED = [...Object.keys(dependencies), ...OF_DEPENDENCIES];

/** Emit a file with the licence texts of all bundled packages. */
function licences() {
  const text = (name) => {
    for (const file of ["LICENSE", "LICENSE.md", "LICENSE.txt", "LICENSE-MIT.txt"]) {
      try {
        return `${name}\n${"-".repeat(name.length)}\n${readFileSync(`node_modules/${name}/${file}`, "utf8").trim()}\n`;
      } catch {
        // try the next file name
      }
    }
    return `${name}\n`;
  };
  return {
    name: "licences",
    generateBundle() {
      this.emitFile({ type: "asset", fileName: "licences.txt", source: SHIPPED.map(text).join("\n\n") });
    },
  };
}

/** Keep only the WOFF2 fonts of KaTeX: every browser that can run the page supports them. */
function oneFontFormat() {
  return {
    name: "one-font-format",
    enforce: "pre",
    transform(code, id) {
      if (!id.includes("katex.min.css")) return null;
      return code.replace(/,url\([^)]+\.(?:woff|ttf)\) format\("(?:woff|truetype)"\)/g, "");
    },
  };
}

// Loaded when a text needs them, and kept from then on.
const NOT_PRECACHED = /^assets\/(katex|languages|geist-mono|mermaid)[.-]|KaTeX/i;

/** Emit the service worker with the list of files that the page needs without a network. */
function serviceWorker() {
  return {
    name: "service-worker",
    enforce: "post",
    generateBundle: {
      order: "post",
      handler(_, bundle) {
        const built = Object.values(bundle).filter(({ fileName }) => fileName.startsWith("assets/"));
        const entry = built.find((file) => file.isEntry).fileName;
        const root = readdirSync("public").sort();
        const files = [...root, ...built.map(({ fileName }) => fileName).sort()].filter(
          (name) => !NOT_PRECACHED.test(name),
        );
        const hash = createHash("sha256").update(bundle["index.html"].source).update(files.join());
        for (const name of root) hash.update(readFileSync(`public/${name}`));
        const build = JSON.stringify({ version: hash.digest("hex").slice(0, 16), entry, files });
        const source = readFileSync("serviceWorker.js", "utf8").replace(
          /^const BUILD = .*$/m,
          `const BUILD = ${build};`,
        );
        this.emitFile({ type: "asset", fileName: "sw.js", source });
      },
    },
  };
}

export default defineConfig({
  base: "./",
  resolve: {
    alias: [{ find: /^entities$/, replacement: fileURLToPath(new URL("src/markdown/entities.ts", import.meta.url)) }],
  },
  plugins: [licences(), oneFontFormat(), serviceWorker()],
  build: {
    outDir: "../chatcache/gateway/static",
    emptyOutDir: true,
    assetsInlineLimit: 0, // the content security policy allows fonts from 'self' only
    modulePreload: { polyfill: false },
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // browsers with light-dark(), which is then not transpiled
    reportCompressedSize: true,
    // one file for the first load: small shared files cost a request and compress badly
    rolldownOptions: {
      output: { codeSplitting: { groups: [{ name: "index", tags: ["$initial"] }] } },
      checks: { pluginTimings: false },
    },
  },
  server: { proxy: { "/v1": { target: process.env.CHATCACHE_URL ?? "http://127.0.0.1:8000", ws: true } } },
  test: {
    environment: "node",
    include: ["test/**/*.test.ts"],
    css: { include: [/\?raw$/] }, // others are empty in tests
    testTimeout: 60_000, // the machine may be busy
    hookTimeout: 60_000,
  },
});
