// Which cells of which lane hold something already.
import { CELL_PX } from "./text";

export class LaneGrid {
  private readonly rows: Uint8Array[] = [];
  private readonly columns: number;

  constructor(width: number) {
    this.columns = Math.ceil(width / CELL_PX) + 1;
  }

  occupy(lane: number, from: number, to: number): void {
    (this.rows[lane] ??= new Uint8Array(this.columns)).fill(1, Math.max(0, Math.floor(from / CELL_PX)), Math.ceil(to / CELL_PX));
  }

  isFree(lane: number, from: number, to: number): boolean {
    const row = this.rows[lane];
    if (!row) return true;
    const end = Math.min(this.columns, Math.ceil(to / CELL_PX));
    for (let cell = Math.max(0, Math.floor(from / CELL_PX)); cell < end; cell++) if (row[cell]) return false;
    return true;
  }
}
