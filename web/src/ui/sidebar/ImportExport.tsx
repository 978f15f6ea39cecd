import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
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

// Drop zone over the whole page: dropped files are imported.

const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;

export function DropZone() {
  const chat = useChat();
  const over = useSignal(false);
  useEffect(() => {
    const onOver = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault(); // otherwise the browser opens the file
      over.value = true;
    };
    const onLeave = (event: DragEvent) => {
      if (event.relatedTarget === null) over.value = false;
    };
    const onDrop = async (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      over.value = false;
      const files = [...(event.dataTransfer?.files ?? [])]; // the event loses them after the handler
      const id = await (await import("../../conversations/importExport")).importFiles(files, chat.conversations);
      if (id !== null) void chat.open(id);
    };
    addEventListener("dragover", onOver);
    addEventListener("dragleave", onLeave);
    addEventListener("drop", onDrop);
    return () => {
      removeEventListener("dragover", onOver);
      removeEventListener("dragleave", onLeave);
      removeEventListener("drop", onDrop);
    };
  }, []);
  if (!over.value) return null;
  return (
    <div class="drop-zone">
      <p>
        <Upload /> Drop to import conversations
      </p>
      <p class="hint">Exports of this server (JSON), or ChatGPT's conversations.json</p>
    </div>
  );
}
