import type { Page } from "./shell/pages";

/** In the order of the navigation rail. */
export const PAGES: Page[] = [
  {
    segment: "",
    title: "Overview",
    icon: "overview",
    needs: "viewer",
    load: async () => (await import("./views/overview/overview")).Overview,
  },
  {
    segment: "adapters",
    title: "Adapters",
    icon: "adapters",
    needs: "viewer",
    load: async () => (await import("./views/adapters/adapters")).Adapters,
  },
  {
    segment: "upload",
    title: "Upload",
    icon: "upload",
    needs: "operator",
    load: async () => (await import("./views/upload/upload")).Upload,
  },
  {
    segment: "playground",
    title: "Playground",
    icon: "playground",
    needs: "operator",
    load: async () => (await import("./views/playground/playground")).Playground,
  },
  {
    segment: "live",
    title: "Live",
    icon: "live",
    needs: "viewer",
    secondary: true,
    load: async () => (await import("./views/live/live")).Live,
  },
  {
    segment: "requests",
    title: "Requests",
    icon: "requests",
    needs: "viewer",
    secondary: true,
    load: async () => (await import("./views/requests/requests")).Requests,
  },
  {
    segment: "access",
    title: "Tenants & keys",
    icon: "tenants",
    needs: "admin",
    secondary: true,
    load: async () => (await import("./views/access/access")).Access,
  },
  {
    segment: "settings",
    title: "Settings",
    icon: "settings",
    needs: "admin",
    ofServer: true,
    secondary: true,
    load: async () => (await import("./views/settings/settings")).Settings,
  },
];
