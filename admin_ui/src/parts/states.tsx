import type { Signal } from "@preact/signals";
import type { ComponentChildren } from "preact";

import type { ApiError } from "../api/client";
import type { Paged } from "../state/paged";
import type { Role } from "../state/session";
import { Command, CopyButton } from "./basics";
import { ago } from "./format";
import { Icon, type IconName } from "./icon";

const STALE_AFTER_MS = 15_000;

/** Nothing here yet: what it is, a button, and the command that does the same. */
export function Empty(props: { icon: IconName; title: string; command?: string; children?: ComponentChildren; action?: ComponentChildren }) {
  return (
    <div class="state" data-testid="empty">
      <Icon name={props.icon} />
      <h2>{props.title}</h2>
      {props.children && <p>{props.children}</p>}
      {props.action}
      {props.command && <Command>{props.command}</Command>}
    </div>
  );
}

interface FailureProps {
  error: ApiError;
  retry?: () => void;
  action?: ComponentChildren;
  /** "h1" where nothing else is on the page. */
  heading?: "h1" | "h2";
}

/** What failed, why, and what to do. 403 and 404 have their own words. */
export function Failure({ error, retry, action, heading: Heading = "h2" }: FailureProps) {
  const forbidden = error.status === 403;
  return (
    <div class={`state ${forbidden ? "" : "is-bad"}`} role="alert" data-testid={forbidden ? "no-permission" : "failure"}>
      <Icon name={forbidden ? "lock" : "warn"} />
      <Heading>{title(error)}</Heading>
      <p>{error.message}</p>
      {error.requestId && (
        <p class="small">
          Request <code>{error.requestId}</code> <CopyButton text={error.requestId} label="Copy the request's id" />
        </p>
      )}
      {action}
      {retry && error.status !== 403 && error.status !== 404 && (
        <button type="button" class="button" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}

function title(error: ApiError): string {
  if (error.status === 0) return "No answer from the server";
  if (error.status === 403) return "Your role may not see this";
  if (error.status === 404) return "This does not exist";
  return "That did not work";
}

interface ViewProps<T> {
  of: { data: Signal<T | null>; error: Signal<ApiError | null>; at: Signal<number>; refresh: () => void };
  skeleton: ComponentChildren;
  /** Where to go from a failure. */
  otherwise?: ComponentChildren;
  /** Whether there is nothing else on the page, not even its heading. */
  whole?: boolean;
  children: (data: T) => ComponentChildren;
}

/** One of the six states of a view: skeleton, failure or no permission without data; data, or data marked as stale. */
export function View<T>(props: ViewProps<T>) {
  const { data, error, at } = props.of;
  // Looked up when it is called: the first render comes before there is one.
  const refresh = () => props.of.refresh();
  if (data.value === null) {
    if (error.value) return <Failure error={error.value} retry={refresh} action={props.otherwise} heading={props.whole ? "h1" : "h2"} />;
    return (
      <div aria-busy="true" data-testid="loading">
        {props.skeleton}
      </div>
    );
  }
  const stale = error.value !== null && Date.now() - at.value > STALE_AFTER_MS;
  return (
    <div>
      {error.value && (
        <p class="stale-note" role="status" data-testid="stale">
          <Icon name="clock" /> As of {ago(at.value / 1000)}: {error.value.message}
        </p>
      )}
      <div class={stale ? "is-stale" : ""}>{props.children(data.value)}</div>
    </div>
  );
}

/** The same of a list, and the button for what comes after its pages. */
export function ListView<T>({ of, older, ...props }: Omit<ViewProps<T[]>, "of"> & { of: Paged<T>; older?: string }) {
  return (
    <>
      <View of={{ data: of.rows, error: of.error, at: of.at, refresh: () => of.refresh() }} {...props} />
      {older && of.rows.value !== null && of.hasMore.value && (
        <button type="button" class="button more" onClick={of.loadMore}>
          {older}
        </button>
      )}
    </>
  );
}

/** What a role may not see, without asking the server. */
export function NoPermission({ title, needs }: { title: string; needs: Role }) {
  return (
    <div class="state" data-testid="no-permission">
      <Icon name="lock" />
      <h1>{title} needs the role {needs}</h1>
      <p>Ask an admin for a key with that role.</p>
    </div>
  );
}

export function SkeletonRows({ rows = 8, height = 36 }: { rows?: number; height?: number }) {
  return (
    <div class="panel">
      {Array.from({ length: rows }, (_, row) => (
        <div key={row} style={{ height: `${height}px`, padding: "10px 16px" }}>
          <div class="skeleton" style={{ width: `${85 - ((row * 17) % 45)}%`, height: "12px" }} />
        </div>
      ))}
    </div>
  );
}
