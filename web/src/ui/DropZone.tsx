// Files dropped on the page: on the list of conversations they are imported, elsewhere they are attached.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { toast } from "../app/notifications";
import { useChat } from "./context";
import { importAll } from "./fileActions";
import { Paperclip, Upload } from "./icons";
import { focusComposer } from "./navigation";

type Zone = "attach" | "import";

const zone = signal<Zone | null>(null); // below the dragged files

const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
const zoneOf = (event: DragEvent): Zone =>
  event.target instanceof Element && event.target.closest(".sidebar") ? "import" : "attach";

/** Handle files that are dragged over the page. Without it the browser would leave the page and open the file. */
export function useFileDrop(): void {
  const chat = useChat();
  useEffect(() => {
    const onOver = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      zone.value = zoneOf(event);
    };
    const onLeave = (event: DragEvent) => {
      if (event.relatedTarget === null) zone.value = null;
    };
    const onDrop = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      zone.value = null;
      const files = droppedFiles(event.dataTransfer!);
      if (zoneOf(event) === "import") void importAll(chat, files);
      else {
        void chat.attachments.add(files);
        focusComposer();
      }
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
}

/** The files of a drop. Call it in the handler: afterwards the event has lost them. */
function droppedFiles(data: DataTransfer): readonly File[] {
  const folders = [...data.items].filter((item) => item.webkitGetAsEntry()?.isDirectory);
  if (folders.length > 0) toast("Folders are not read. Drop the files in them.");
  const names = new Set(folders.map((item) => item.webkitGetAsEntry()?.name));
  return [...data.files].filter(({ name }) => !names.has(name));
}

/** Cover of the region that takes the dragged files. */
export function DropZone({ name }: { name: Zone }) {
  if (zone.value === null) return null;
  return (
    <div class={`drop-zone ${zone.value === name ? "drop-zone-over" : ""}`} data-zone={name}>
      <p>
        {name === "attach" ? <Paperclip /> : <Upload />}
        {name === "attach" ? "Drop to attach to the message" : "Drop to import conversations"}
      </p>
      <p class="hint">
        {name === "attach"
          ? "Text, code and PDF"
          : "Exports (JSON) of this server, ChatGPT, Open WebUI, LibreChat or llama.cpp"}
      </p>
    </div>
  );
}
