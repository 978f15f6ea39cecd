// The server for its administrators: load, workers, tenants, users and keys, in counts. Read anew while it is shown.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { type AdminKey, type AdminOverview, getAdminOverview } from "../api/rest";
import { formatDuration, formatShare } from "../app/format";
import { Poller } from "../server/poller";
import { Close } from "./icons";
import { Modal } from "./Modal";
import { closeDialog } from "./navigation";
import "./administration.css";

const POLL_MS = 3000;

/** `readAt`: in milliseconds, by the clock of the page. */
type Figures = AdminOverview & { readonly readAt: number };

async function readFigures(): Promise<Figures> {
  return { ...(await getAdminOverview()), readAt: performance.now() };
}

export function Administration() {
  const dialog = useRef<HTMLDialogElement>(null);
  const overview = useMemo(() => new Poller(readFigures, POLL_MS), []);
  useEffect(() => overview.start(), []);
  const { current, previous, error } = overview;
  return (
    <Modal class="administration" dialog={dialog} label="Administration" onClosed={() => closeDialog("administration")}>
      <header class="panel-head">
        <h2>Administration</h2>
        <button
          type="button"
          class="tool"
          aria-label="Close the administration"
          onClick={() => dialog.current?.close()}
        >
          <Close />
        </button>
      </header>
      {error.value !== null && (
        <p class="ending ending-error" role="alert">
          {current.value ? "These figures are outdated. " : "The figures did not load. "}
          {error.value}
        </p>
      )}
      {current.value ? (
        <Overview now={current.value} before={previous.value} />
      ) : (
        error.value === null && <p class="hint">Loading the figures.</p>
      )}
    </Modal>
  );
}

function Overview({ now, before }: { now: Figures; before: Figures | null }) {
  const { server, tenants, users, keys } = now;
  const named = users.filter(({ user, conversations }) => user !== "" || conversations > 0);
  return (
    <>
      <p class="hint">
        {server.model}, chatcache {server.version}, running for {formatDuration(server.uptime_s)}
        {!server.ready && ". The engine is not ready."}
      </p>
      <Load now={now} before={before} />
      {server.workers.length > 0 && (
        <Table title="Workers" columns={["Worker", "Requests", "Prompt tokens", "From cache"]}>
          {server.workers.map((worker) => (
            <Row
              key={worker.name}
              name={worker.name}
              values={[
                count(worker.num_requests),
                count(worker.num_prompt_tokens),
                formatShare(worker.num_cached_tokens, worker.num_prompt_tokens),
              ]}
            />
          ))}
        </Table>
      )}
      <Table title="Tenants" columns={["Tenant", "Keys", "Conversations", "Pages in use"]}>
        {tenants.map(({ tenant, keys, conversations, pages_in_use }) => (
          <Row
            key={tenant}
            name={tenant || "all users"}
            values={[count(keys), count(conversations), count(Math.round(pages_in_use))]}
          />
        ))}
      </Table>
      {named.length > 0 && (
        <Table title="Users" columns={["User", "Tenant", "Conversations"]}>
          {named.map(({ tenant, user, conversations }) => (
            <Row
              key={`${tenant}/${user}`}
              name={user || "(no name)"}
              values={[tenant || "all users", count(conversations)]}
            />
          ))}
        </Table>
      )}
      {keys.length > 0 && (
        <Table title="Keys" columns={["Key", "Owner", "Tokens today", "Limits"]}>
          {keys.map((key) => (
            <Row
              key={key.id}
              name={key.name || key.id}
              note={key.revoked_at !== null ? "revoked" : key.is_admin ? "administrator" : ""}
              values={[
                key.user ? `${key.tenant}/${key.user}` : key.tenant,
                key.tokens_per_day === null
                  ? count(key.tokens_today)
                  : `${count(key.tokens_today)} of ${count(key.tokens_per_day)}`,
                limitsOf(key),
              ]}
            />
          ))}
        </Table>
      )}
    </>
  );
}

/** `before`: the figures of the poll before. */
function Load({ now, before }: { now: Figures; before: Figures | null }) {
  const { server } = now;
  const figures: readonly [string, string][] = [
    ["Running", count(server.num_running)],
    ["Waiting", count(server.num_waiting)],
    ["Tokens per second", before === null ? "–" : count(tokensPerSecond(before, now))],
    ["Pages in use", formatShare(server.num_pages_in_use, server.num_pages)],
    ["From cache", formatShare(server.num_cached_tokens, server.num_prompt_tokens)],
    ["Preemptions", count(server.num_preemptions)],
    ["Evicted pages", count(server.num_evictions)],
    ["Engine restarts", count(server.num_restarts)],
  ];
  return (
    <dl class="load" aria-label="Load">
      {figures.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd data-figure={name}>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Generated tokens per second between two polls; 0 if the engine restarted. */
function tokensPerSecond(before: Figures, now: Figures): number {
  const generated = now.server.num_output_tokens - before.server.num_output_tokens;
  return Math.round((1000 * Math.max(0, generated)) / (now.readAt - before.readAt));
}

function Table(props: { title: string; columns: readonly string[]; children: ComponentChildren }) {
  return (
    <section class="admin-table" aria-label={props.title} tabIndex={0}>
      <table>
        <caption>{props.title}</caption>
        <thead>
          <tr>
            {props.columns.map((column) => (
              <th key={column} scope="col">
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{props.children}</tbody>
      </table>
    </section>
  );
}

function Row({ name, note = "", values }: { name: string; note?: string; values: readonly string[] }) {
  return (
    <tr>
      <th scope="row">
        {name}
        {note && <span class="hint">{note}</span>}
      </th>
      {values.map((value, index) => (
        <td key={index}>{value}</td>
      ))}
    </tr>
  );
}

function count(value: number): string {
  return value.toLocaleString("en");
}

function limitsOf(key: AdminKey): string {
  const limits = [
    key.requests_per_minute !== null && `${count(key.requests_per_minute)} requests/min`,
    key.tokens_per_minute !== null && `${count(key.tokens_per_minute)} tokens/min`,
    key.max_concurrent !== null && `${count(key.max_concurrent)} at once`,
  ];
  return limits.filter(Boolean).join(", ") || "none";
}
