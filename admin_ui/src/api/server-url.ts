/** Of the API, without a slash at its end. The console is at `ui/` beside it, which may be behind a path of a proxy. */
export const serverUrl = new URL("..", document.baseURI).href.replace(/\/$/, "");
