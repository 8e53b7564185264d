#!/bin/sh
# Checks that the committed API types and built files match the sources.
set -eu
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
npx openapi-typescript ../docs/openapi.json -o "$made/schema.d.ts"
diff "$made/schema.d.ts" src/api/schema.d.ts || { echo "src/api/schema.d.ts is out of date: make ui" >&2; exit 1; }
npx tsc --noEmit
npx vite build --outDir "$made/ui" --emptyOutDir --logLevel warn
diff -r "$made/ui" ../loraserve/static/ui || { echo "loraserve/static/ui is out of date: make ui" >&2; exit 1; }
