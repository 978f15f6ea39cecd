// How often growing texts are drawn. A drawing that took long is followed by a pause in proportion, so that whatever
// arrives, and however many texts grow side by side, drawing takes a small share of the main thread.
const SHARE = 0.025;

type Draw = () => void;

export class Pace {
  private readonly waiting = new Map<object, Draw>();
  private timer: ReturnType<typeof setTimeout> | null = null;
  private restUntilMs = 0;

  /** Draw soon; a later call with the same `owner` replaces one that still waits. */
  request(owner: object, draw: Draw): void {
    this.waiting.set(owner, draw);
    if (this.timer !== null) return;
    const wait = this.restUntilMs - performance.now();
    if (wait > 0) this.timer = setTimeout(() => this.run(), wait);
    else this.run();
  }

  /** What is final does not wait. */
  now(owner: object, draw: Draw): void {
    this.waiting.delete(owner);
    draw();
  }

  forget(owner: object): void {
    this.waiting.delete(owner);
  }

  private run(): void {
    this.timer = null;
    const started = performance.now();
    const draws = [...this.waiting.values()];
    this.waiting.clear();
    for (const draw of draws) draw();
    const ended = performance.now();
    this.restUntilMs = ended + (ended - started) * (1 / SHARE - 1);
  }
}
