import type { FunctionComponent } from "preact";

import type { IconName } from "../parts/icon";
import type { Role } from "../state/session";

/** A view in the navigation rail, identified by the first segment of the fragment. */
export interface Page {
  segment: string;
  title: string;
  icon: IconName;
  needs: Role;
  /** About the whole server: needs a key for all tenants. */
  ofServer?: boolean;
  /** Omitted from the bottom bar of small screens; its last button (“More”) lists every page. */
  secondary?: boolean;
  load: () => Promise<FunctionComponent>;
}
