/** The API's base URL without a trailing slash: the console's own URL without `ui/`, so that it also works under a proxy's path prefix. */
export const serverUrl = new URL("..", document.baseURI).href.replace(/\/$/, "");
