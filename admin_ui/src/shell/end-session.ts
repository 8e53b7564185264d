import { toast } from "../parts/toasts";
import { logOut } from "../state/session";

/** Logs out, or reports that it failed: a user who wrongly believes it worked would walk away from an open session. */
export async function endSession(): Promise<void> {
  try {
    await logOut();
  } catch (error) {
    toast(`You are still logged in. ${error instanceof Error ? error.message : String(error)}`);
  }
}
