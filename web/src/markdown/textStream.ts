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

// ---- How often growing texts are drawn. A drawing that took long is followed by a pause in proportion, so that whatever
// arrives, and however many texts grow side by side, drawing takes a small share of the main thread.

const MAX_DRAW_SHARE = 0.025;

type Draw = () => void;

export class DrawPacer {
  private readonly pending = new Map<object, Draw>();
  private timer: ReturnType<typeof setTimeout> | null = null;
  private idleUntilMs = 0;

  /** Draw soon; a later call with the same `owner` replaces one that still waits. */
  schedule(owner: object, draw: Draw): void {
    this.pending.set(owner, draw);
    if (this.timer !== null) return;
    const wait = this.idleUntilMs - performance.now();
    if (wait > 0) this.timer = setTimeout(() => this.run(), wait);
    else this.run();
  }

  /** What is final does not wait. */
  drawNow(owner: object, draw: Draw): void {
    this.pending.delete(owner);
    draw();
  }

  cancel(owner: object): void {
    this.pending.delete(owner);
  }

  private run(): void {
    this.timer = null;
    const started = performance.now();
    const draws = [...this.pending.values()];
    this.pending.clear();
    for (const draw of draws) draw();
    const ended = performance.now();
    this.idleUntilMs = ended + (ended - started) * (1 / MAX_DRAW_SHARE - 1);
  }
}
