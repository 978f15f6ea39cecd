// The MCP servers of the operator, and their tools as functions of requests. A server's name is the namespace.
import { signal } from "@preact/signals";
import type { ToolFields, WireCall } from "../api/frames";
import { listMcpServers, type McpServer, type McpTool } from "../api/mcp";
import { toast } from "../app/notifications";

const LIFETIME_MS = 300_000; // of the list; the server reads the tools again as often

export class ToolServers {
  readonly list = signal<readonly McpServer[] | null>(null); // null: not loaded
  private loadedAt = 0;
  private loading: Promise<void> | null = null;

  /** Load the list, or load it again. */
  load(): Promise<void> {
    this.loading ??= listMcpServers()
      .then((servers) => {
        this.list.value = servers;
        this.loadedAt = Date.now();
      })
      .finally(() => {
        this.loading = null;
      });
    return this.loading;
  }

  /** Load the list if a request with the tools of these servers needs it; null if the request need not wait. */
  prepare(names: readonly string[]): Promise<void> | null {
    const list = this.list.peek();
    const isReady = (name: string) => list?.some((server) => server.name === name && server.state === "ready");
    if (names.length === 0 || (names.every(isReady) && Date.now() - this.loadedAt < LIFETIME_MS)) return null;
    const loading = this.load().catch((error: Error) => void toast(`The tools did not load. ${error.message}`));
    return list === null ? loading : null;
  }

  /** The tools of these servers as a field of requests, which is absent without tools. */
  fieldsOf(names: readonly string[]): ToolFields {
    const servers = (this.list.value ?? []).filter(({ name, tools }) => names.includes(name) && tools.length > 0);
    const tools = servers.map((server) => ({
      type: "namespace" as const,
      name: server.name,
      tools: server.tools.map(({ name, description, parameters }) => ({
        type: "function" as const,
        name,
        description,
        parameters,
      })),
    }));
    return tools.length > 0 ? { tools } : {};
  }

  /** The tool that a call names; undefined if no server has it. */
  find(call: WireCall): McpTool | undefined {
    const server = this.list.value?.find(({ name }) => name === call.namespace);
    return server?.tools.find(({ name }) => name === call.name);
  }
}
