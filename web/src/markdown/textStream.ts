// Shows growing markdown texts: loads the renderer (40 KB) with the first text, and limits how often texts are drawn.

type Renderer = typeof import("./renderer");

/** A text that grows inside `root`. */
interface TextStream {
  update(text: string, complete: boolean): void;
}

let renderer: Renderer | null = null;
let loading: Promise<Renderer | null> | null = null;

/** Start loading the renderer before it is needed. */
export function loadRenderer(): Promise<Renderer | null> {
  loading ??= import("./renderer").then(
    (module) => (renderer = module),
    () => (loading = null), // did not load: texts are shown as plain text, the next one tries again
  );
  return loading;
}

/** Open a stream. `drawn` is called when a text that waited for the renderer has been drawn. */
export function openStream(root: HTMLElement, drawn: () => void = () => {}): TextStream {
  return renderer ? renderer.makeStream(root) : new DeferredStream(root, drawn);
}

/** Holds the newest text until the renderer is loaded. */
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

// -- Draw pacing: a drawing is followed by a pause in proportion to its duration, so that drawing takes a small share
// of the main thread however many texts grow at once

const MAX_DRAW_SHARE = 0.025;
const MAX_PAUSE_MS = 28; // on a processor that is 4 times slower, too, text appears 20 times a second

type Draw = () => void;

export class DrawPacer {
  private readonly pending = new Map<object, Draw>();
  private timer: ReturnType<typeof setTimeout> | null = null;
  private idleUntilMs = 0;

  /** Draw soon; a later call with the same `owner` replaces a pending one. */
  schedule(owner: object, draw: Draw): void {
    this.pending.set(owner, draw);
    if (this.timer !== null) return;
    const wait = this.idleUntilMs - performance.now();
    if (wait > 0) this.timer = setTimeout(() => this.run(), wait);
    else this.run();
  }

  /** Draw the final text immediately. */
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
    this.idleUntilMs = ended + Math.min((ended - started) * (1 / MAX_DRAW_SHARE - 1), MAX_PAUSE_MS);
  }
}
