// KV page map: one cell per KV page of the server, updated once a second. PageInspector shows the text on a page.

import { useEffect, useMemo } from "preact/hooks";
import { type CacheMap, getCacheMap } from "../../api/rest";
import { BOX, changedPath, columnsFor, countStates, numDrawn, PAGE_STATES, pagePaths } from "../../draw/pages";
import { Poller } from "../../server/poller";
import { useChat } from "../context";
import { EmptyPanel } from "../EmptyState";
import { PageInspector } from "./PageInspector";
import "./page-map.css";

const POLL_MS = 1000;

export function KvPagesPanel() {
  const watch = useMemo(() => new Poller(getCacheMap, POLL_MS), []);
  const loading = ["loading", "unavailable"].includes(useChat().readiness.status.value.phase);
  useEffect(() => (loading ? undefined : watch.start()), [loading]);
  const map = watch.current.value;
  const failure = watch.error.value;
  if (!map && failure !== null)
    return (
      <p class="ending ending-error" role="alert">
        The page map did not load. {failure}
      </p>
    );
  if (!map)
    return (
      <p class="hint">{loading ? "The page map is available once the model is loaded." : "Loading the page map."}</p>
    );
  return (
    <>
      {failure !== null && (
        <p class="ending ending-error" role="alert">
          The page map is outdated. {failure}
        </p>
      )}
      <KvPageMap map={map} before={watch.previous.value?.cells ?? ""} />
    </>
  );
}

function KvPageMap({ map, before }: { map: CacheMap; before: string }) {
  const { cells } = map;
  const drawn = numDrawn(cells);
  const columns = columnsFor(drawn);
  const paths = useMemo(() => pagePaths(cells.slice(0, drawn), columns), [cells]);
  const changed = useMemo(() => changedPath(cells, before, columns), [cells, before]);
  const counts = useMemo(() => countStates(cells), [cells]);
  const used = cells.length - (counts.get("free") ?? 0) - (counts.get("idle") ?? 0);
  const share = (count: number) => `${Math.round((1000 * count) / Math.max(1, cells.length)) / 10}%`;
  const noun = map.pages_per_cell > 1 ? "cells" : "pages";
  return (
    <>
      <p class="side-summary">
        <span>
          <b data-stat="pages">{map.num_pages.toLocaleString("en")}</b> pages of {map.page_size} tokens
          {map.pages_per_cell > 1 && `, ${map.pages_per_cell} to a cell`}
        </span>
        <span>
          <b>{share(used)}</b> in use
        </span>
      </p>
      <PageInspector map={map} drawn={drawn} columns={columns}>
        {PAGE_STATES.map(({ name }) => (
          <path key={name} class={`page page-${name}`} d={paths.get(name)} />
        ))}
        {changed && <path key={changed} class="page-changed" d={changed} />}
      </PageInspector>
      <table class="page-table">
        <caption class="sr-only">Pages by state</caption>
        <thead class="sr-only">
          <tr>
            <th>State</th>
            <th>Number of {noun}</th>
            <th>Share</th>
          </tr>
        </thead>
        <tbody>
          {PAGE_STATES.filter(({ name }) => counts.get(name) || !["pinned", "other"].includes(name)).map(
            ({ name, label, description, shape }) => (
              <tr key={name}>
                <th scope="row">
                  <svg viewBox={`0 0 ${BOX} ${BOX}`} aria-hidden="true">
                    <path class={`page page-${name}`} d={`M0 0${shape}`} />
                  </svg>
                  {label}
                  <span class="hint">{description}</span>
                </th>
                <td data-count={name}>{(counts.get(name) ?? 0).toLocaleString("en")}</td>
                <td>{share(counts.get(name) ?? 0)}</td>
              </tr>
            ),
          )}
        </tbody>
      </table>
      {drawn < cells.length && (
        <p class="hint">
          The other {(cells.length - drawn).toLocaleString("en")} {noun} are free and not drawn.
        </p>
      )}
      {map.pages_per_cell > 1 && (
        <p class="hint">One cell represents {map.pages_per_cell} pages and shows the state of the busiest one.</p>
      )}
      {counts.get("free") === cells.length && (
        <EmptyPanel title="All pages are free">
          Send a message to see pages fill. After the answer they stay cached for the next turn.
        </EmptyPanel>
      )}
    </>
  );
}
