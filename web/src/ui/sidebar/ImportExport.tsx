import { useChat } from "../context";
import { Download, More, Upload } from "../icons";
import { MenuButton } from "../Menu";

export function ImportExportMenu() {
  const chat = useChat();
  const pick = () => {
    const input = document.createElement("input");
    input.type = "file";
    input.multiple = true;
    input.accept = ".json,.jsonl,.ndjson,application/json";
    input.onchange = async () => {
      const { importFiles } = await import("../../conversations/importExport");
      const id = await importFiles([...(input.files ?? [])], chat.conversations);
      if (id !== null) void chat.open(id);
    };
    input.click();
  };
  const exportAll = async () =>
    (await import("../../conversations/importExport")).exportConversations(null, "conversations");
  return (
    <MenuButton
      label="Import and export"
      items={[
        { label: "Import from files…", icon: <Upload />, run: pick },
        { label: "Export all as JSON", icon: <Download />, run: () => void exportAll() },
      ]}
    >
      <More />
    </MenuButton>
  );
}
