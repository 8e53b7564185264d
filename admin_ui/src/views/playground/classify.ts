import { ApiError, call } from "../../api/client";
import type { ClassifyResponse, ModelCard, RerankResponse } from "../../api/types";
import { tenantHeaders } from "../../state/session";
import { type PlaygroundSettings, requestBody, requestPath } from "./request";

export interface Label {
  /** The label's name, or the document. */
  name: string;
  /** A probability, unless `areProbabilities` is false. */
  number: number;
}

export interface Classified {
  /** Largest number first. */
  labels: Label[];
  areProbabilities: boolean;
  usage: ClassifyResponse["usage"];
  version: string | null;
}

/** Classifies the prompt (one number per label) or ranks the documents (one number per document). Throws `ApiError`. */
export async function classify(model: string, settings: PlaygroundSettings, signal: AbortSignal): Promise<Classified> {
  const headers = tenantHeaders(settings.tenant);
  const { data, headers: answered } = await call<ClassifyResponse | RerankResponse>("POST", requestPath(settings), {
    body: requestBody(model, settings),
    headers,
    signal,
  });
  const version = answered.get("x-adapter-version");
  const classifier = await classifierOf(`${model.split("@")[0]}@v${version}`, headers, signal);
  const labels =
    "results" in data
      ? data.results.map(({ relevance_score, document }) => ({ name: document?.text ?? "", number: relevance_score }))
      : (data.data[0]?.probs ?? []).map((number, index) => ({ name: classifier?.labels?.[index] ?? `LABEL_${index}`, number }));
  return {
    labels: labels.sort((one, other) => other.number - one.number),
    areProbabilities: classifier?.problem_type !== "regression",
    usage: data.usage,
    version,
  };
}

/** The classifier of the version that answered (an alias may point to another version by now); null if the server does not report it. */
async function classifierOf(name: string, headers: Record<string, string>, signal: AbortSignal) {
  try {
    return (await call<ModelCard>("GET", `/v1/models/${encodeURIComponent(name)}`, { headers, signal })).data.adapter?.classifier ?? null;
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}
