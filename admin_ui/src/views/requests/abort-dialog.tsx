import { call } from "../../api/client";
import type { RequestItem } from "../../api/types";
import { Dialog } from "../../parts/dialog";
import { toast } from "../../parts/toasts";
import { tenantHeaders } from "../../state/session";

export function AbortDialog({ request, onClose, onDone }: { request: RequestItem; onClose: () => void; onDone: () => void }) {
  return (
    <Dialog
      title="Abort this request?"
      confirm="Abort request"
      danger
      onClose={onClose}
      onConfirm={async () => {
        await call("DELETE", `/v1/requests/${encodeURIComponent(request.id)}`, { headers: tenantHeaders(request.tenant) });
        toast("Request aborted. It ends within two seconds.");
        onDone();
      }}
    >
      <p>
        Request <code>{request.id}</code> to {request.adapter ?? "the base model"} ends with an error; tokens delivered so far are billed. This cannot be
        undone.
      </p>
    </Dialog>
  );
}
