import { requestHeaders } from "../../api/client";
import { serverUrl } from "../../api/server-url";
import { shellWord } from "../../parts/commands";
import { session, tenantHeaders } from "../../state/session";
import { type AnswerSettings, responseFormat } from "./answer-format";

export const MODES = ["chat", "completion", "classify", "rerank"] as const;
export type Mode = (typeof MODES)[number];

const PATHS: Record<Mode, string> = {
  chat: "/v1/chat/completions",
  completion: "/v1/completions",
  classify: "/v1/classify",
  rerank: "/v1/rerank",
};

export interface PlaygroundSettings extends AnswerSettings {
  mode: Mode;
  /** The owner of the adapters that the columns name; null = the shown tenant. */
  tenant: string | null;
  prompt: string;
  /** The documents to rank, one per line. */
  documents: string;
  system: string;
  maxTokens: number;
  temperature: number;
  /** The same for every column, so that they differ only by model. */
  seed: number;
}

/** Whether the answer is text rather than a classifier's numbers. */
export function asksForText(mode: Mode): boolean {
  return mode === "chat" || mode === "completion";
}

export function documentsOf({ documents }: PlaygroundSettings): string[] {
  return documents.split("\n").filter((line) => line.trim() !== "");
}

export function requestPath({ mode }: PlaygroundSettings): string {
  return PATHS[mode];
}

export function requestBody(model: string, settings: PlaygroundSettings): Record<string, unknown> {
  const { mode, prompt, system, maxTokens, temperature, seed } = settings;
  if (mode === "classify") return { model, input: prompt };
  if (mode === "rerank") return { model, query: prompt, documents: documentsOf(settings) };
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
  return {
    model,
    ...(mode === "chat" ? { messages } : { prompt }),
    max_tokens: maxTokens,
    temperature,
    seed,
    ...responseFormat(settings),
    stream: true,
    stream_options: { include_usage: true },
    include_metrics: true,
  };
}

/** A column's request as a curl command. The key is a variable, never its secret. */
export function asCurl(model: string, settings: PlaygroundSettings): string {
  const body = shellWord(JSON.stringify(requestBody(model, settings)));
  const auth = session.value?.open ? "" : ' \\\n  -H "Authorization: Bearer $LORASERVE_API_KEY"';
  const acting = { ...requestHeaders("GET"), ...tenantHeaders(settings.tenant) }["x-tenant"];
  const tenant = acting ? ` \\\n  -H ${shellWord(`X-Tenant: ${acting}`)}` : "";
  return `curl -N ${serverUrl}${requestPath(settings)} \\\n  -H 'Content-Type: application/json'${auth}${tenant} \\\n  -d ${body}`;
}
