import preact from "@preact/preset-vite";
import { defineConfig } from "vite";

// The built files are committed, and the API serves them under /ui, so users need no Node.
const server = process.env.LORASERVE_URL ?? "http://127.0.0.1:8000";

export default defineConfig({
  base: "./",
  plugins: [preact({ devToolsEnabled: false })],
  build: {
    outDir: "../loraserve/static/ui",
    emptyOutDir: true,
    target: "es2022",
    // The content security policy allows no data: scripts and no inline ones.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  // For `npm run dev` next to a running server.
  server: { proxy: Object.fromEntries(["/v1", "/health", "/version", "/schema"].map((path) => [path, { target: server }])) },
});
