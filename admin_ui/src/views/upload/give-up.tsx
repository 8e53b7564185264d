import { useSignal } from "@preact/signals";

import { Dialog } from "../../parts/dialog";

/** Ends an upload for good, once the person has said so twice. */
export function GiveUp({ name, onConfirm }: { name: string; onConfirm: () => Promise<unknown> }) {
  const asking = useSignal(false);
  return (
    <>
      <button type="button" class="button" onClick={() => (asking.value = true)}>
        Give up
      </button>
      {asking.value && (
        <Dialog title={`Give up the upload of ${name}?`} confirm="Give it up" danger onClose={() => (asking.value = false)} onConfirm={onConfirm}>
          <p>What was sent is deleted. The adapter stays as it is.</p>
        </Dialog>
      )}
    </>
  );
}
