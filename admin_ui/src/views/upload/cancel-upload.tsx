import { useSignal } from "@preact/signals";

import { Dialog } from "../../parts/dialog";

/** Ends an upload for good, once the person has said so twice. */
export function CancelUpload({ name, onConfirm }: { name: string; onConfirm: () => Promise<unknown> }) {
  const asking = useSignal(false);
  return (
    <>
      <button type="button" class="button" onClick={() => (asking.value = true)}>
        Cancel upload
      </button>
      {asking.value && (
        <Dialog title={`Cancel the upload of ${name}?`} confirm="Cancel upload" dismiss="Keep it" danger onClose={() => (asking.value = false)} onConfirm={onConfirm}>
          <p>What was sent is deleted. The adapter stays as it is.</p>
        </Dialog>
      )}
    </>
  );
}
