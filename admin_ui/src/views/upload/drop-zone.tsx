import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";

import { Icon } from "../../parts/icon";
import { readDrop, readInput } from "./chosen-files";

/** Accepts a folder or files, by drag and drop or by file picker. */
export function DropZone({ onFiles }: { onFiles: (files: { file: File; path: string }[]) => void }) {
  const over = useSignal(false);
  const files = useRef<HTMLInputElement>(null);
  const folder = useRef<HTMLInputElement>(null);

  function take(input: HTMLInputElement): void {
    onFiles(readInput(input));
    // Otherwise, choosing the same files again after fixing them would fire no change event.
    input.value = "";
  }

  async function drop(event: DragEvent): Promise<void> {
    event.preventDefault();
    over.value = false;
    if (event.dataTransfer) onFiles(await readDrop(event.dataTransfer));
  }

  return (
    <div
      class={`drop-zone ${over.value ? "is-over" : ""}`}
      data-testid="drop-zone"
      onDragOver={(event) => {
        event.preventDefault();
        over.value = true;
      }}
      onDragLeave={() => (over.value = false)}
      onDrop={drop}
    >
      <Icon name="folder" />
      <p>
        Drop an adapter folder here, or its <code>adapter_config.json</code> and <code>adapter_model.safetensors</code>.
      </p>
      <div class="cluster">
        <button type="button" class="button" onClick={() => folder.current?.click()}>
          Choose a folder
        </button>
        <button type="button" class="button" onClick={() => files.current?.click()}>
          Choose files
        </button>
      </div>
      <input
        ref={files}
        type="file"
        multiple
        hidden
        aria-label="Adapter files"
        data-testid="file-input"
        onChange={(event) => take(event.currentTarget)}
      />
      <input
        ref={folder}
        type="file"
        hidden
        aria-label="Adapter folder"
        data-testid="folder-input"
        {...{ webkitdirectory: true }}
        onChange={(event) => take(event.currentTarget)}
      />
    </div>
  );
}
