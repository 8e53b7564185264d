import type { FunctionComponent } from "preact";

import type { IconName } from "../parts/icon";
import type { Role } from "../state/session";

/** A view of the rail, found by the first segment of the fragment. */
export interface Page {
  segment: string;
  title: string;
  icon: IconName;
  needs: Role;
  /** Left out of the bottom bar of small screens, whose last place leads to all of them. */
  secondary?: boolean;
  load: () => Promise<FunctionComponent>;
}
