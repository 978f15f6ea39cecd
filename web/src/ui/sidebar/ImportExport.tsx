import { useChat } from "../context";
import { exportAll, importFromPicker } from "../fileActions";
import { Download, More, Upload } from "../icons";
import { MenuButton } from "../Menu";

export function ImportExportMenu() {
  const chat = useChat();
  return (
    <MenuButton
      label="Import and export"
      items={[
        { label: "Import from files…", icon: <Upload />, run: () => importFromPicker(chat) },
        { label: "Export all as JSON", icon: <Download />, run: () => void exportAll() },
      ]}
    >
      <More />
    </MenuButton>
  );
}
