// The MCP servers of the operator in the settings: which of them offer their tools in this conversation.

import { useEffect } from "preact/hooks";
import type { McpServer } from "../api/mcp";
import { plural } from "../app/format";
import { sampling, setSampling } from "../app/settings";
import { useChat } from "./context";

export function ToolSettings() {
  const { toolServers } = useChat();
  useEffect(() => void toolServers.load().catch(() => {}), []); // without the list, no server is shown
  const servers = toolServers.list.value ?? [];
  if (servers.length === 0) return null;
  return (
    <fieldset class="field">
      <legend>Tools</legend>
      {servers.map((server) => (
        <ToolServer key={server.name} server={server} />
      ))}
      <p class="hint">The model may call the tools of the servers that are switched on in this conversation.</p>
    </fieldset>
  );
}

const STATES = { connecting: "connecting", unavailable: "not available" } as const;

function ToolServer({ server: { name, state, error, tools } }: { server: McpServer }) {
  const names = sampling.value.toolServers;
  const change = (isOn: boolean) =>
    setSampling({ toolServers: isOn ? [...names, name] : names.filter((other) => other !== name) });
  return (
    <div class="tool-server">
      <label class="check">
        <input
          type="checkbox"
          checked={names.includes(name)}
          onChange={(event) => change(event.currentTarget.checked)}
        />
        {name}
        <span class="hint">{state === "ready" ? plural(tools.length, "tool") : STATES[state]}</span>
      </label>
      {error !== null && <p class="hint">{error}</p>}
      {tools.length > 0 && (
        <details>
          <summary>Tools of {name}</summary>
          <ul>
            {tools.map((tool) => (
              <li key={tool.name} title={tool.description}>
                <code>{tool.name}</code> <span class="hint">{tool.needs_confirmation ? "asks first" : "runs"}</span>
              </li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}
