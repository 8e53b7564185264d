import { computed, signal } from "@preact/signals";

import { ApiError, call, requestHeaders } from "../../api/client";
import { serverUrl } from "../../api/server-url";
import type { UploadItem } from "../../api/types";
import { randomId } from "../../parts/clipboard";
import { tenantHeaders } from "../../state/session";

export const CONFIG_FILE = "adapter_config.json";
export const WEIGHTS_FILE = "adapter_model.safetensors";

const TERMINAL = new Set(["ready", "rejected", "failed", "expired", "aborted"]);
const WAIT_S = 10;
const RETRY_MS = 2000;
const MAX_RETRIES = 30;

export interface FileProgress {
  name: string;
  sizeBytes: number;
  sentBytes: number;
}

/** The upload of one adapter. Each chunk is acknowledged, so that a lost connection costs one chunk. */
export class UploadJob {
  readonly session = signal<UploadItem | null>(null);
  readonly progress = signal<FileProgress[]>([]);
  /** Set while the connection is lost and the job waits to continue. */
  readonly waiting = signal(false);
  readonly error = signal<ApiError | null>(null);
  readonly bytesPerS = signal(0);
  readonly ended = computed(() => this.error.value !== null || (this.session.value !== null && isTerminal(this.session.value)));
  private readonly aborter = new AbortController();
  private activate = true;
  /** Idempotency key of the session's creation: if the response is lost, a retry finds the same session. */
  private creation = randomId();

  constructor(
    readonly name: string,
    /** The tenant that the adapter will belong to, even if the user switches tenants in the meantime. */
    readonly tenant: string,
    private readonly files: File[],
  ) {
    this.progress.value = files.map((file) => ({ name: file.name, sizeBytes: file.size, sentBytes: 0 }));
  }

  /** Opens a session, or continues `known`, of which the server already has some bytes. */
  async run(activate: boolean, known: UploadItem | null = null): Promise<void> {
    this.activate = activate;
    this.error.value = null;
    try {
      const session = known ?? (await this.create(activate));
      this.session.value = session;
      // The configuration first, then the weights, which start with their header: errors there are refused at the first chunk.
      for (const file of [...this.files].sort((a, b) => order(a.name) - order(b.name))) {
        await this.send(session, file);
      }
      await this.call<UploadItem>("POST", `/v1/uploads/${session.id}/commit`);
      await this.follow(session.id);
    } catch (error) {
      if (this.aborter.signal.aborted) return;
      await this.fail(error);
    }
  }

  /** Retries after an error; continues the session, if there is one, from its current state on the server. */
  async retry(): Promise<void> {
    const id = this.session.value?.id;
    let known: UploadItem | null = null;
    try {
      if (id !== undefined) known = await this.call<UploadItem>("GET", `/v1/uploads/${id}`);
    } catch (error) {
      // Create a second session only if the first one is gone.
      if (!(error instanceof ApiError && error.status === 404)) return this.fail(error);
      this.creation = randomId();
    }
    if (known && isTerminal(known)) {
      this.session.value = known;
      this.error.value = null;
    } else await this.run(this.activate, known);
  }

  /** Commits again after a failure with all files received: the cause may be gone. */
  async commitAgain(): Promise<void> {
    const session = this.session.value;
    if (session === null) return;
    this.session.value = { ...session, state: "validating", error: null };
    try {
      await this.call<UploadItem>("POST", `/v1/uploads/${session.id}/commit`);
      await this.follow(session.id);
    } catch (error) {
      await this.fail(error);
    }
  }

  /** Aborts the session on the server and stops sending. If the server refuses or does not respond, the upload continues. */
  async cancel(): Promise<void> {
    const session = this.session.value;
    if (session) await call("DELETE", `/v1/uploads/${session.id}`, { headers: this.headers() });
    this.aborter.abort();
    if (session) this.session.value = { ...session, state: "aborted" };
  }

  private async create(activate: boolean): Promise<UploadItem> {
    const files = this.files.map((file) => ({ name: file.name, size_bytes: file.size }));
    const path = `/v1/adapters/${encodeURIComponent(this.name)}/uploads`;
    return this.call<UploadItem>("POST", path, { files, activate }, { "idempotency-key": this.creation });
  }

  private async send(session: UploadItem, file: File): Promise<void> {
    let offset = session.files.find((known) => known.name === file.name)?.offset ?? 0;
    let retries = 0;
    this.sent(file.name, offset);
    while (offset < file.size) {
      const end = Math.min(offset + session.chunk_bytes, file.size);
      try {
        offset = await this.put(session.id, file, offset, end);
        retries = 0;
        this.waiting.value = false;
      } catch (error) {
        const actual = error instanceof ApiError && error.status === 409 ? await this.offsetOnServer(session.id, file.name) : null;
        if (actual !== null && actual !== offset) offset = actual;
        else if (isTransient(error) && retries++ < MAX_RETRIES) await this.pause();
        else throw error;
      }
      this.sent(file.name, offset);
    }
  }

  /** Uses XMLHttpRequest because it reports upload progress. */
  private put(id: string, file: File, start: number, end: number): Promise<number> {
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      const began = performance.now();
      request.open("PUT", `${serverUrl}/v1/uploads/${id}/files/${encodeURIComponent(file.name)}`);
      request.setRequestHeader("content-type", "application/octet-stream");
      request.setRequestHeader("content-range", `bytes ${start}-${end - 1}/${file.size}`);
      for (const [name, value] of Object.entries(this.headers("PUT"))) request.setRequestHeader(name, value);
      request.upload.onprogress = (event) => this.sent(file.name, start + event.loaded);
      request.onerror = () => void whyUnsent(file).then(reject);
      request.onload = () => {
        this.bytesPerS.value = (end - start) / Math.max(0.001, (performance.now() - began) / 1000);
        if (request.status === 200) resolve((JSON.parse(request.responseText) as { offset: number }).offset);
        else reject(errorOf(request));
      };
      this.aborter.signal.addEventListener("abort", () => request.abort(), { once: true });
      request.send(file.slice(start, end));
    });
  }

  private async follow(id: string): Promise<void> {
    let retries = 0;
    for (;;) {
      try {
        const session = await this.call<UploadItem>("GET", `/v1/uploads/${id}?wait_s=${WAIT_S}`);
        this.session.value = session;
        this.waiting.value = false;
        retries = 0;
        if (TERMINAL.has(session.state)) return;
      } catch (error) {
        if (!isTransient(error) || retries++ >= MAX_RETRIES) throw error;
        await this.pause();
      }
    }
  }

  private async fail(error: unknown): Promise<void> {
    this.waiting.value = false;
    const failure = error instanceof ApiError ? error : new ApiError(0, "failed", String(error));
    const id = this.session.value?.id;
    // A rejection at the first chunk ends the session, which then has a report.
    if (id && failure.status >= 400 && failure.status < 500) {
      const session = await this.call<UploadItem>("GET", `/v1/uploads/${id}`).catch(() => null);
      if (session) this.session.value = session;
      if (session && TERMINAL.has(session.state)) return;
    }
    this.error.value = failure;
  }

  private async offsetOnServer(id: string, name: string): Promise<number | null> {
    const session = await this.call<UploadItem>("GET", `/v1/uploads/${id}`);
    return session.files.find((file) => file.name === name)?.offset ?? null;
  }

  private async call<T>(method: string, path: string, body?: unknown, headers: Record<string, string> = {}): Promise<T> {
    const options = { headers: { ...this.headers(), ...headers }, signal: this.aborter.signal, ...(body === undefined ? {} : { body }) };
    return (await call<T>(method, path, options)).data;
  }

  private headers(method = "GET"): Record<string, string> {
    return { ...requestHeaders(method), ...tenantHeaders(this.tenant) };
  }

  private pause(): Promise<void> {
    this.waiting.value = true;
    return new Promise((resolve) => window.setTimeout(resolve, RETRY_MS));
  }

  private sent(name: string, sentBytes: number): void {
    this.progress.value = this.progress.value.map((file) => (file.name === name ? { ...file, sentBytes } : file));
  }
}

export function isTerminal(session: UploadItem): boolean {
  return TERMINAL.has(session.state);
}

function order(name: string): number {
  return name === CONFIG_FILE ? 0 : 1;
}

/** Why a file could not be sent: the browser cannot read a file that changed after it was chosen. */
async function whyUnsent(file: File): Promise<ApiError> {
  try {
    await file.slice(0, 1).arrayBuffer();
    return new ApiError(0, "unreachable", "The server is not responding.");
  } catch {
    return new ApiError(400, "file_changed", `${file.name} can no longer be read: it was changed or moved after you chose it. Choose it again.`);
  }
}

function isTransient(error: unknown): boolean {
  return error instanceof ApiError && (error.status === 0 || error.status === 502 || error.status === 503);
}

function errorOf(request: XMLHttpRequest): ApiError {
  try {
    const { error } = JSON.parse(request.responseText) as { error: { code: string; message: string } };
    return new ApiError(request.status, error.code, error.message, null, request.getResponseHeader("x-request-id"));
  } catch {
    return new ApiError(request.status, `http_${request.status}`, `The server returned HTTP ${request.status}.`);
  }
}
