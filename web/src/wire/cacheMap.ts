// The state of every KV page, over REST.
import { call } from "./rest";

export interface CacheMap {
  readonly page_size: number; // tokens
  readonly num_pages: number;
  readonly pages_per_cell: number; // more than 1 beyond 4,096 pages; the busiest one's state stands for all
  readonly cells: string; // in page order
}

export function getCacheMap(): Promise<CacheMap> {
  return call("GET", "v1/cache/map");
}
