// Which cells of which lane hold something already.
import { CELL } from "./text";

export class Lanes {
  private readonly rows: Uint8Array[] = [];
  private readonly columns: number;

  constructor(width: number) {
    this.columns = Math.ceil(width / CELL) + 1;
  }

  take(lane: number, from: number, to: number): void {
    (this.rows[lane] ??= new Uint8Array(this.columns)).fill(1, Math.max(0, Math.floor(from / CELL)), Math.ceil(to / CELL));
  }

  isFree(lane: number, from: number, to: number): boolean {
    const row = this.rows[lane];
    if (!row) return true;
    const end = Math.min(this.columns, Math.ceil(to / CELL));
    for (let cell = Math.max(0, Math.floor(from / CELL)); cell < end; cell++) if (row[cell]) return false;
    return true;
  }
}
