import { useSignal } from "@preact/signals";

import { Dialog } from "../../parts/dialog";

/** Ends an upload for good, after a confirmation. */
export function CancelUpload({ name, onConfirm }: { name: string; onConfirm: () => Promise<unknown> }) {
  const asking = useSignal(false);
  return (
    <>
      <button type="button" class="button" onClick={() => (asking.value = true)}>
        Cancel upload
      </button>
      {asking.value && (
        <Dialog title={`Cancel the upload of ${name}?`} confirm="Cancel upload" dismiss="Keep upload" danger onClose={() => (asking.value = false)} onConfirm={onConfirm}>
          <p>The files sent so far are deleted. The adapter itself does not change.</p>
        </Dialog>
      )}
    </>
  );
}
