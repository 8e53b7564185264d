/** 16-pixel line icons. Each one only decorates: there is a word next to it, or its button has a label. */
const PATHS = {
  adapters: "M2.5 4.5 8 1.8l5.5 2.7L8 7.2 2.5 4.5Zm0 3.6L8 10.8l5.5-2.7M2.5 11.6 8 14.3l5.5-2.7",
  upload: "M8 10.5v-8m0 0L4.8 5.7M8 2.5l3.2 3.2M2.5 10.5v3h11v-3",
  playground: "M2.5 3.5h11v7.2H8l-3 2.8v-2.8H2.5z",
  overview: "M2 12.5h12M4 12.5V8m4 4.5V3.5m4 9V6",
  live: "M1.5 8h3l2-5 3 10 2-5h3",
  tenants: "M6 7.5a2.4 2.4 0 1 0 0-4.8 2.4 2.4 0 0 0 0 4.8ZM1.8 13.3c.4-2.5 2-3.9 4.2-3.9s3.8 1.4 4.2 3.9M10.8 3.1a2.2 2.2 0 0 1 0 4.2m1 2.5c1.4.4 2.2 1.6 2.5 3.5",
  requests: "M3 3h10M3 6.3h10M3 9.6h10M3 13h6",
  settings: "M8 10.2a2.2 2.2 0 1 0 0-4.4 2.2 2.2 0 0 0 0 4.4ZM8 1.8v2m0 8.4v2M1.8 8h2m8.4 0h2M3.6 3.6 5 5m6 6 1.4 1.4m0-8.8L11 5m-6 6-1.4 1.4",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9Zm3.3-1.2 3.2 3.2",
  sun: "M8 10.8a2.8 2.8 0 1 0 0-5.6 2.8 2.8 0 0 0 0 5.6ZM8 1.5V3m0 10v1.5M1.5 8H3m10 0h1.5M3.4 3.4l1.1 1.1m7 7 1.1 1.1m0-9.2-1.1 1.1m-7 7-1.1 1.1",
  moon: "M13.2 9.6A5.6 5.6 0 0 1 6.4 2.8a5.6 5.6 0 1 0 6.8 6.8Z",
  check: "m3 8.5 3.2 3.2L13 4.8",
  cross: "m4 4 8 8m0-8-8 8",
  warn: "M8 2.2 14.2 13H1.8L8 2.2Zm0 4.2v3.2m0 1.6v.3",
  info: "M8 14a6 6 0 1 0 0-12 6 6 0 0 0 0 12Zm0-6.8v3.6M8 5v.3",
  copy: "M5.5 5.5v-3h8v8h-3m-8-5h8v8h-8z",
  arrow: "M3 8h10m-4-4 4 4-4 4",
  back: "M13 8H3m4-4L3 8l4 4",
  undo: "M3 6.5h6.5a3.5 3.5 0 0 1 0 7H6M3 6.5l3-3m-3 3 3 3",
  plus: "M8 3v10M3 8h10",
  trash: "M2.5 4.5h11m-9.5 0 .7 9h6.6l.7-9M6 4.5v-2h4v2",
  play: "M5 3.2v9.6L13 8 5 3.2Z",
  stop: "M4.5 4.5h7v7h-7z",
  clock: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12Zm0-9.5V8l2.4 1.6",
  lock: "M4 7.5h8v6H4zm1.7 0V5.2a2.3 2.3 0 0 1 4.6 0v2.3",
  flag: "M4 14V2.5m0 .5h8l-1.8 2.8L12 8.5H4",
  pin: "M8 10v4M5 2.5h6l-.8 4 2 2.3v1.2H3.8V8.8l2-2.3-.8-4Z",
  down: "m4 6 4 4 4-4",
  key: "M9.8 6.2a3 3 0 1 1-2.9-3.8 3 3 0 0 1 2.9 3.8Zm-.7 1.3 4.7 4.7v1.6h-2l-.3-1.6-1.6-.2-.2-1.7-1.6-1.5",
  folder: "M2 3.5h4l1.4 1.6H14v7.4H2z",
  file: "M4 2h5.2L12 4.8V14H4zm5 0v3h3",
  more: "M3.5 8h.01M8 8h.01M12.5 8h.01",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg
      class="icon"
      viewBox="0 0 16 16"
      fill="none"
      stroke="currentColor"
      stroke-width="1.4"
      stroke-linecap="round"
      stroke-linejoin="round"
      aria-hidden="true"
    >
      <path d={PATHS[name]} />
    </svg>
  );
}
