// REST client of the MCP servers that the operator configured: their tools, and calls of tools.
import type { JsonObject } from "./frames";
import { call } from "./rest";

export interface McpTool {
  readonly name: string;
  readonly description: string;
  readonly parameters: JsonObject;
  readonly needs_confirmation: boolean;
}

export interface McpServer {
  readonly name: string;
  readonly state: "ready" | "connecting" | "unavailable";
  readonly error: string | null; // why its tools could not be read
  readonly tools: readonly McpTool[];
}

export interface McpCall {
  readonly server: string;
  readonly tool: string;
  readonly arguments: string; // JSON, as the model wrote it
  readonly confirmed: boolean; // by the user
}

export interface McpResult {
  readonly output: string;
  readonly is_error: boolean;
  readonly seconds: number;
}

export async function listMcpServers(): Promise<readonly McpServer[]> {
  return (await call<{ data: readonly McpServer[] }>("GET", "v1/mcp/servers")).data;
}

/** Call a tool; aborting `signal` ends the call on the server, too. */
export function callMcpTool(request: McpCall, signal: AbortSignal): Promise<McpResult> {
  return call("POST", "v1/mcp/calls", request, { signal });
}
