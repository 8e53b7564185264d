import { batch, computed, signal } from "@preact/signals";

import { ApiError } from "../../api/client";
import { type StreamChunk, streamCompletion } from "../../api/stream";
import { tenantHeaders } from "../../state/session";
import { type Classified, classify } from "./classify";
import { asksForText, type PlaygroundSettings, requestBody, requestPath } from "./request";

export type RunState = "idle" | "waiting" | "streaming" | "done" | "stopped" | "failed";

/** One column's answer as it arrives. */
export class ColumnRun {
  readonly state = signal<RunState>("idle");
  readonly text = signal("");
  /** The model's reasoning before its answer. */
  readonly reasoning = signal("");
  /** Whether it has started to reason but not yet to answer. */
  readonly thinks = computed(() => this.state.value === "streaming" && this.text.value === "");
  /** A classifier's result; `text` is then the top label or the best document. */
  readonly classified = signal<Classified | null>(null);
  readonly error = signal<ApiError | null>(null);
  readonly version = signal<string | null>(null);
  readonly finishReason = signal<string | null>(null);
  readonly ttftMs = signal<number | null>(null);
  readonly tokensPerS = signal<number | null>(null);
  readonly usage = signal<{ prompt: number; cached: number; output: number; reasoning: number } | null>(null);
  private aborter: AbortController | null = null;

  async start(model: string, settings: PlaygroundSettings): Promise<void> {
    this.stop();
    const aborter = (this.aborter = new AbortController());
    this.reset("waiting");
    const began = performance.now();
    let firstAt: number | null = null;
    try {
      if (!asksForText(settings.mode)) {
        const classified = await classify(model, settings, aborter.signal);
        if (aborter.signal.aborted) return;
        batch(() => {
          this.classified.value = classified;
          this.text.value = classified.labels[0]?.name ?? "";
          this.version.value = classified.version;
          this.ttftMs.value = performance.now() - began;
          this.take({ choices: [], usage: classified.usage });
          this.state.value = "done";
        });
        return;
      }
      const stream = streamCompletion(requestPath(settings), requestBody(model, settings), tenantHeaders(settings.tenant), aborter.signal, (head) => {
        this.version.value = head.adapterVersion;
      });
      for await (const chunk of stream) {
        // A chunk that had already arrived when the user stopped the run.
        if (aborter.signal.aborted) return;
        const choice = chunk.choices[0];
        const piece = choice?.text ?? choice?.delta?.content ?? "";
        const thought = choice?.delta?.reasoning_content ?? "";
        const now = performance.now();
        if (piece || thought) firstAt ??= now;
        batch(() => {
          if (piece || thought) {
            this.state.value = "streaming";
            this.text.value += piece;
            this.reasoning.value += thought;
            this.ttftMs.value = (firstAt ?? now) - began;
          }
          if (choice?.finish_reason) this.finishReason.value = choice.finish_reason;
          this.take(chunk);
        });
      }
      if (!aborter.signal.aborted) this.state.value = "done";
    } catch (error) {
      if (aborter.signal.aborted) return;
      this.error.value = error instanceof ApiError ? error : new ApiError(0, "failed", String(error));
      this.state.value = "failed";
    }
  }

  /** Closes the connection, which aborts the request on the server. */
  stop(): void {
    if (this.state.value !== "waiting" && this.state.value !== "streaming") return;
    this.aborter?.abort();
    this.state.value = "stopped";
  }

  /** Removes an answer that came from another model. */
  clear(): void {
    this.stop();
    this.reset("idle");
  }

  private take({ usage, metrics }: StreamChunk): void {
    if (usage) {
      this.usage.value = {
        prompt: usage.prompt_tokens,
        cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
        output: usage.completion_tokens,
        reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
      };
    }
    // As measured by the server: here, tokens that arrive while the page is busy are received together.
    if (metrics) this.tokensPerS.value = metrics.tokens_per_second;
  }

  private reset(state: RunState): void {
    batch(() => {
      this.state.value = state;
      this.text.value = "";
      this.reasoning.value = "";
      this.classified.value = null;
      this.error.value = null;
      this.version.value = null;
      this.finishReason.value = null;
      this.ttftMs.value = null;
      this.tokensPerS.value = null;
      this.usage.value = null;
    });
  }
}
