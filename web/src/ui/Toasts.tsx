// Short messages at the foot of the page.
import { dismiss, toasts } from "../state/toast";
import { Close } from "./icons";

export function Toasts() {
  return (
    <div class="toasts" role="status">
      {toasts.value.map((toast) => (
        <div key={toast.id} class="toast">
          <span>{toast.text}</span>
          {toast.action && (
            <button
              type="button"
              class="link"
              onClick={() => {
                toast.action?.run();
                dismiss(toast.id);
              }}
            >
              {toast.action.label}
            </button>
          )}
          <button type="button" class="tool" aria-label="Dismiss" onClick={() => dismiss(toast.id)}><Close /></button>
        </div>
      ))}
    </div>
  );
}
