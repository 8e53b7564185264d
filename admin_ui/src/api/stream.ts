import { ApiError, open } from "./client";

/** One `data:` line of a completion stream. */
export interface StreamChunk {
  choices: { text?: string; delta?: StreamDelta; finish_reason?: string | null }[];
  usage?: StreamUsage | null;
  /** In the last chunk, if requested. */
  metrics?: { tokens_per_second: number | null } | null;
  error?: { message: string; code: string };
}

export interface StreamDelta {
  content?: string | null;
  /** The model's reasoning before its answer, if the server separates the two. */
  reasoning_content?: string | null;
}

interface StreamUsage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens: number };
  completion_tokens_details?: { reasoning_tokens?: number };
}

export interface StreamHead {
  adapterVersion: string | null;
  requestId: string | null;
}

/** Sends a POST and reads server-sent events. Throws `ApiError`, also for an error that arrives after the first byte. */
export async function* streamCompletion(
  path: string,
  body: unknown,
  headers: Record<string, string>,
  signal: AbortSignal,
  onHead: (head: StreamHead) => void,
): AsyncGenerator<StreamChunk> {
  const response = await open("POST", path, { body, headers, signal });
  onHead({ adapterVersion: response.headers.get("x-adapter-version"), requestId: response.headers.get("x-request-id") });
  if (!response.body) throw new ApiError(0, "no_body", "The response has no body.");
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice(6);
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data) as StreamChunk;
    if (chunk.error) throw new ApiError(response.status, chunk.error.code, chunk.error.message, null, response.headers.get("x-request-id"));
    yield chunk;
  }
  throw cutOff();
}

function cutOff(): ApiError {
  return new ApiError(0, "cut_off", "The stream ended before the answer was complete.");
}

async function* lines(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error: unknown) => {
        throw error instanceof DOMException && error.name === "AbortError" ? error : cutOff();
      });
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop() ?? "";
      yield* parts;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
