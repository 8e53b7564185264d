import { useSignal } from "@preact/signals";

import { download } from "../../api/download";
import type { AdapterDetail } from "../../api/types";
import { Icon } from "../../parts/icon";
import { toast } from "../../parts/toasts";
import { tenantHeaders } from "../../state/session";
import { adapterPath } from "./adapter-api";

const FILES = ["adapter_config.json", "adapter_model.safetensors"];

/** Downloads of this version's configuration and weights, as the server stores them. */
export function Files({ adapter, version }: { adapter: AdapterDetail; version: number }) {
  const fetching = useSignal<string | null>(null);

  async function save(file: string): Promise<void> {
    fetching.value = file;
    try {
      const path = adapterPath(adapter.name, `/versions/${version}/files/${file}`);
      await download(path, `${adapter.name}-v${version}-${file}`, tenantHeaders(adapter.tenant));
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    } finally {
      fetching.value = null;
    }
  }

  return (
    <section class="panel panel-body files" data-testid="files">
      <h2>Files</h2>
      <ul>
        {FILES.map((file) => (
          <li key={file} class="file-row">
            <Icon name="file" />
            <code class="truncate">{file}</code>
            <button type="button" class="button" aria-label={`Download ${file}`} disabled={fetching.value !== null} onClick={() => void save(file)}>
              {fetching.value === file ? "Downloading…" : "Download"}
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}
