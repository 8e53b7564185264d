import type { Signal } from "@preact/signals";
import type { ComponentChildren } from "preact";

import type { ApiError } from "../api/client";
import type { Paged } from "../state/paged";
import type { Role } from "../state/session";
import { Command, CopyButton } from "./basics";
import { ago } from "./format";
import { Icon, type IconName } from "./icon";

const STALE_AFTER_MS = 15_000;

/** Empty state: a title, an explanation, a button, and the equivalent command. */
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
  /** "h1" if nothing else is on the page. */
  heading?: "h1" | "h2";
}

/** What failed, why, and what to do. 403 and 404 have their own titles. */
export function Failure({ error, retry, action, heading: Heading = "h2" }: FailureProps) {
  const forbidden = error.status === 403;
  return (
    <div class={`state ${forbidden ? "" : "is-bad"}`} role="alert" data-testid={forbidden ? "no-permission" : "failure"}>
      <Icon name={forbidden ? "lock" : "warn"} />
      <Heading>{title(error)}</Heading>
      <p>{error.message}</p>
      {error.requestId && (
        <p class="small">
          Request <code>{error.requestId}</code> <CopyButton text={error.requestId} label="Copy the request ID" />
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
  if (error.status === 0) return "No response from the server";
  if (error.status === 403) return "You don't have permission for this";
  if (error.status === 404) return "Not found";
  return "Something went wrong";
}

interface ViewProps<T> {
  of: { data: Signal<T | null>; error: Signal<ApiError | null>; at: Signal<number>; refresh: () => void };
  skeleton: ComponentChildren;
  /** Where to go instead after a failure, such as a link to the list. */
  otherwise?: ComponentChildren;
  /** Whether this is the whole page, including its heading. */
  whole?: boolean;
  children: (data: T) => ComponentChildren;
}

/** One of the six states of a view: skeleton, failure or no permission without data; data, or data marked as stale. */
export function View<T>(props: ViewProps<T>) {
  const { data, error, at } = props.of;
  // Looked up at call time: during the first render it is not set yet.
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
          <Icon name="clock" /> Last updated {ago(at.value / 1000)}: {error.value.message}
        </p>
      )}
      <div class={stale ? "is-stale" : ""}>{props.children(data.value)}</div>
    </div>
  );
}

/** The same for a list, with a button that loads the next page. */
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

/** Shown without asking the server if the role may not see the page. ofServer: it also needs a key for all tenants. */
export function NoPermission({ title, needs, ofServer }: { title: string; needs: Role; ofServer?: boolean }) {
  return (
    <div class="state" data-testid="no-permission">
      <Icon name="lock" />
      <h1>
        {title} requires the {needs} role{ofServer && " for all tenants"}
      </h1>
      <p>Ask an admin{ofServer && " of the server"} for a key with that role.</p>
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
