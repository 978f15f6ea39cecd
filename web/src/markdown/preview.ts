// Preview of an HTML or SVG code block in a sandboxed frame, which has no origin and loads nothing. `srcdoc` and blob
// documents would inherit the content security policy of the page, which forbids inline scripts and styles.

/** Whether a complete code block can be shown as a page. */
export function isPreviewable(language: string, text: string): boolean {
  return (
    language === "html" || language === "svg" || (language === "xml" && /^\s*(<\?xml[^>]*>\s*)?<svg[\s>]/.test(text))
  );
}

/** Button that shows the preview in place of the code, and the code again. */
export function previewButton(pre: HTMLPreElement): HTMLButtonElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "code-copy code-preview";
  button.textContent = "Preview";
  let view: HTMLIFrameElement | null = null;
  button.addEventListener("click", () => {
    if (view) view.remove();
    else pre.after(makeFrame(pre.textContent ?? ""));
    view = view ? null : (pre.nextElementSibling as HTMLIFrameElement);
    pre.hidden = view !== null;
    button.textContent = view ? "Code" : "Preview";
  });
  return button;
}

function makeFrame(source: string): HTMLIFrameElement {
  const view = document.createElement("iframe");
  view.title = "Preview";
  view.setAttribute("sandbox", "allow-scripts");
  view.addEventListener("load", () => view.contentWindow?.postMessage(source, "*"), { once: true }); // it has no origin
  view.src = new URL("preview.html", document.baseURI).href;
  return view;
}
