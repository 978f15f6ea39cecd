// How often growing texts are drawn. A drawing that took long is followed by a pause in proportion, so that whatever
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
