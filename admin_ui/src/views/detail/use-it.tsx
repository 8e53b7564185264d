import { serverUrl } from "../../api/server-url";
import type { AdapterDetail, VersionItem } from "../../api/types";
import { CopyButton } from "../../parts/basics";
import { curlHeaders } from "../../parts/commands";
import { session } from "../../state/session";

/** Requests to copy, with this adapter's name in them; a key is named, never shown. */
export function UseIt({ adapter, version }: { adapter: AdapterDetail; version: VersionItem | null }) {
  const names = [adapter.name, ...(version ? [`${adapter.name}@v${version.n}`] : [])];
  return (
    <div class="stack">
      <Snippet title="curl" code={curl(adapter, "/v1/chat/completions", { messages: [{ role: "user", content: "Hello" }], max_tokens: 64 })} />
      <Snippet title="Python" code={python(adapter)} />
      <Snippet title="Embeddings, where it was trained for them" code={curl(adapter, "/v1/embeddings", { input: ["Hello"] })} />
      <Snippet title="A base URL of its own, for clients that cannot choose a model" code={`${serverUrl}/adapters/${adapter.name}/v1`} />
      <p class="muted">
        As the model, <code>{names[0]}</code> means what is live{names[1] && (
          <>
            {" "}
            and <code>{names[1]}</code> always this version
          </>
        )}
        .
      </p>
    </div>
  );
}

function Snippet({ title, code }: { title: string; code: string }) {
  return (
    <section class="panel">
      <header class="panel-head snippet-head">
        <h2>{title}</h2>
        <CopyButton text={code} label={`Copy: ${title}`} />
      </header>
      <pre class="panel-body snippet" tabIndex={0}>
        {code}
      </pre>
    </section>
  );
}

function curl({ name, tenant }: AdapterDetail, path: string, asked: object): string {
  const headers = curlHeaders(tenant).map((header) => ` \\\n  -H "${header}"`).join("");
  return `curl ${serverUrl}${path}${headers} \\\n  -d '${JSON.stringify({ model: name, ...asked })}'`;
}

function python({ name, tenant }: AdapterDetail): string {
  const keyed = !session.value?.open;
  const acting = curlHeaders(tenant).some((header) => header.startsWith("X-Tenant"));
  const headers = acting ? `, default_headers={"X-Tenant": "${tenant}"}` : "";
  const key = keyed ? 'os.environ["LORASERVE_API_KEY"]' : '"none"';
  return `${keyed ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${serverUrl}/v1", api_key=${key}${headers})
answer = client.chat.completions.create(
    model="${name}",
    messages=[{"role": "user", "content": "Hello"}],
    max_tokens=64,
)
print(answer.choices[0].message.content)`;
}
