// The renderer is 40 KB that the start page does not need. It is fetched with the first text, and stays.
type Renderer = typeof import("./renderer");

/** A text that grows in `root`. */
export interface TextStream {
  update(text: string, complete: boolean): void;
}

let renderer: Renderer | null = null;
let loading: Promise<Renderer | null> | null = null;

/** Ask for the renderer before there is something to draw. */
export function loadRenderer(): Promise<Renderer | null> {
  loading ??= import("./renderer").then(
    (module) => (renderer = module),
    () => (loading = null), // did not arrive: texts stand there as they are, the next one asks again
  );
  return loading;
}

/** `drawn` hears when a text that had to wait for the renderer stands there. */
export function openStream(root: HTMLElement, drawn: () => void = () => {}): TextStream {
  return renderer ? renderer.makeStream(root) : new DeferredStream(root, drawn);
}

/** Keeps the newest text until the renderer is there. */
class DeferredStream implements TextStream {
  private stream: TextStream | null = null;
  private last: [string, boolean] | null = null;

  constructor(root: HTMLElement, drawn: () => void) {
    void loadRenderer().then((module) => {
      root.classList.toggle("prose-plain", module === null);
      this.stream = module?.makeStream(root) ?? { update: (text) => (root.textContent = text) };
      if (!this.last) return;
      this.stream.update(...this.last);
      drawn();
    });
  }

  update(text: string, complete: boolean): void {
    this.last = [text, complete];
    this.stream?.update(text, complete);
  }
}
