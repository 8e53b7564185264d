import { toast } from "../parts/toasts";
import { logOut } from "../state/session";

/** Log out, or say that it did not work: a person who believes it walks away from an open session. */
export async function endSession(): Promise<void> {
  try {
    await logOut();
  } catch (error) {
    toast(`You are still logged in. ${error instanceof Error ? error.message : String(error)}`);
  }
}
