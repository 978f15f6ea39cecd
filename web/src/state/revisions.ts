// Which changes of a conversation the page has seen. Every change has a number of its own, so what the page did itself
// need not be read back, and what somebody else did is never taken for it.

export class StaleCheck {
  private seen = 0; // everything up to here
  private readonly ahead = new Set<number>();

  /** All of the conversation was read as it stood then. */
  markRead(rev: number): void {
    this.seen = Math.max(this.seen, rev);
    this.advance();
  }

  /** That one change is known: the page made it, or watched it happen. */
  markSeen(rev: number): void {
    if (rev > this.seen) this.ahead.add(rev);
    this.advance();
  }

  /** Whether a conversation that stands at `rev` holds something the page has not seen. */
  isStale(rev: number): boolean {
    return rev > this.seen;
  }

  private advance(): void {
    while (this.ahead.delete(this.seen + 1)) this.seen++;
    for (const rev of this.ahead) if (rev <= this.seen) this.ahead.delete(rev);
  }
}
