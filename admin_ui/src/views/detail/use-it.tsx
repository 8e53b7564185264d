import { serverUrl } from "../../api/server-url";
import type { AdapterDetail, VersionItem } from "../../api/types";
import { CopyButton } from "../../parts/basics";
import { curlHeaders, shellWord } from "../../parts/commands";
import { session } from "../../state/session";

/** Example requests to copy, with this adapter's name. The key is a variable, never its secret. */
export function UseIt({ adapter, version }: { adapter: AdapterDetail; version: VersionItem | null }) {
  const names = [adapter.name, ...(version ? [`${adapter.name}@v${version.n}`] : [])];
  const live = adapter.versions.find(({ aliases }) => aliases.includes("live"));
  // The activating text has to be in the prompt, and a chat template might not put it there.
  const prompt = live?.invocation ? `Hello${live.invocation.text ?? ""}` : null;
  if (live?.classifier) {
    return (
      <div class="stack">
        {live.classifier.num_labels === 1 && (
          <Snippet title="Rank documents" code={curl(adapter, "/v1/rerank", { query: "Hello?", documents: ["Hello", "Good night"] })} />
        )}
        <Snippet title="curl" code={curl(adapter, "/v1/classify", { input: ["Hello"] })} />
        <Snippet title="Python" code={pythonClassify(adapter)} />
        <Snippet title={`Its own base URL, which serves /classify${live.classifier.num_labels === 1 ? " and /rerank" : ""}`} code={`${serverUrl}/adapters/${adapter.name}/v1`} />
        <Names names={names} />
      </div>
    );
  }
  const asked = prompt === null ? { messages: [{ role: "user", content: "Hello" }], max_tokens: 64 } : { prompt, max_tokens: 64 };
  return (
    <div class="stack">
      <Snippet title="curl" code={curl(adapter, prompt === null ? "/v1/chat/completions" : "/v1/completions", asked)} />
      <Snippet title="Python" code={python(adapter, prompt)} />
      <Snippet title="Embeddings, if it was trained for them" code={curl(adapter, "/v1/embeddings", { input: [prompt ?? "Hello"] })} />
      <Snippet title="Its own base URL, for clients that cannot set a model" code={`${serverUrl}/adapters/${adapter.name}/v1`} />
      <Names names={names} />
    </div>
  );
}

function Names({ names }: { names: string[] }) {
  return (
    <p class="muted">
      As the model name, <code>{names[0]}</code> means the live version{names[1] && (
        <>
          {" "}
          and <code>{names[1]}</code> always means this version
        </>
      )}
      .
    </p>
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
  return `curl ${serverUrl}${path}${headers} \\\n  -d ${shellWord(JSON.stringify({ model: name, ...asked }))}`;
}

/** prompt: for a completion; null = chat. */
function python({ name, tenant }: AdapterDetail, prompt: string | null): string {
  const [route, asked, answer] =
    prompt === null
      ? ["chat.completions", 'messages=[{"role": "user", "content": "Hello"}]', "message.content"]
      : ["completions", `prompt=${JSON.stringify(prompt)}`, "text"];
  return `${client(tenant)}
answer = client.${route}.create(
    model="${name}",
    ${asked},
    max_tokens=64,
)
print(answer.choices[0].${answer})`;
}

function pythonClassify({ name, tenant }: AdapterDetail): string {
  return `${client(tenant)}
answer = client.post(
    "/classify",
    cast_to=object,
    body={"model": "${name}", "input": ["Hello"]},
)
print(answer["data"][0]["label"])`;
}

/** Python code that creates an OpenAI client; tenant: the adapter's. */
function client(tenant: string): string {
  const keyed = !session.value?.open;
  const acting = curlHeaders(tenant).some((header) => header.startsWith("X-Tenant"));
  const headers = acting ? `, default_headers={"X-Tenant": "${tenant}"}` : "";
  const key = keyed ? 'os.environ["LORASERVE_API_KEY"]' : '"none"';
  return `${keyed ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${serverUrl}/v1", api_key=${key}${headers})`;
}
