// Preview of an HTML, SVG or Mermaid code block in a sandboxed frame, which has no origin and loads nothing. `srcdoc` and
// blob documents would inherit the content security policy of the page, which forbids inline scripts and styles.
import mermaidUrl from "@mermaid-js/tiny/dist/mermaid.tiny.js?url";

const RUNS_SCRIPTS = /<script|\son\w+\s*=/i;

/** Whether a complete code block can be shown as a page. */
export function isPreviewable(language: string, text: string): boolean {
  return (
    ["html", "svg", "mermaid"].includes(language) ||
    (language === "xml" && /^\s*(<\?xml[^>]*>\s*)?<svg[\s>]/.test(text))
  );
}

/**
 * Buttons that show the preview in place of the code, and the code again. Scripts run after a second click: no policy
 * stops them from sending the text of the block through WebRTC.
 */
export function previewButtons(pre: HTMLPreElement, language: string): HTMLElement {
  const buttons = document.createElement("span");
  buttons.className = "code-previews";
  let view: HTMLIFrameElement | null = null;
  const text = (): string => pre.textContent ?? "";
  const preview = makeButton("Preview", () => show(view === null, false));
  const run = makeButton("Run scripts", () => show(true, true));
  const show = (visible: boolean, scripts: boolean): void => {
    view?.remove();
    view = null;
    if (visible) view = language === "mermaid" ? makeFrame(diagramPage(text()), true) : makeFrame(text(), scripts);
    if (view) pre.after(view);
    pre.hidden = visible;
    preview.textContent = visible ? "Code" : "Preview";
    run.hidden = !visible || scripts || language === "mermaid" || !RUNS_SCRIPTS.test(text());
  };
  run.hidden = true;
  preview.classList.add("code-preview");
  buttons.append(run, preview);
  return buttons;
}

function makeButton(text: string, click: () => void): HTMLButtonElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "code-copy";
  button.textContent = text;
  button.addEventListener("click", click);
  return button;
}

function makeFrame(text: string | Promise<string>, scripts: boolean): HTMLIFrameElement {
  const view = document.createElement("iframe");
  view.title = "Preview";
  view.setAttribute("sandbox", "allow-scripts");
  const send = async (): Promise<void> => {
    const message = { text: await text, scripts };
    view.contentWindow?.postMessage(message, "*"); // the frame has no origin that could be named
  };
  view.addEventListener("load", () => void send(), { once: true });
  view.src = new URL("preview.html", document.baseURI).href;
  return view;
}

/** A page that draws a diagram. Mermaid sets inline styles, which only the frame allows; so its script goes there. */
async function diagramPage(text: string): Promise<string> {
  const response = await fetch(mermaidUrl).catch(() => null);
  if (!response?.ok) return "<!doctype html><p>The diagram cannot be drawn: its program did not load.</p>";
  const source = JSON.stringify(text).replaceAll("<", "\\u003c");
  return `<!doctype html><style>body { font: 1rem system-ui } svg { max-width: 100% }</style><div id="diagram"></div>
<script>${await response.text()}</script>
<script>
  const diagram = document.getElementById("diagram");
  mermaid.initialize({ startOnLoad: false, suppressErrorRendering: true });
  mermaid.render("drawn", ${source}).then(
    ({ svg }) => (diagram.innerHTML = svg),
    (error) => (diagram.textContent = error.message),
  );
</script>`;
}
