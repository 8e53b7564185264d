// llama.cpp through node-llama-cpp: prints one JSON line. Arguments: node_modules, folder of .gguf files, requests.jsonl.
//
// A batch has one adapter (its context's), so requests are grouped by adapter, as if all had arrived at once: the best
// order for llama.cpp. Within a group, and for the base model, 16 run at a time.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const CONCURRENCY = 16;
const [nodeModules, folder, requestsPath] = process.argv.slice(2);
const entry = createRequire(join(nodeModules, "x.js")).resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(entry).href);

const requests = readFileSync(requestsPath, "utf8").trim().split("\n").map((line) => JSON.parse(line));
const groups = new Map(requests.map(({ model }) => [model, requests.filter((request) => request.model === model)]));
const llama = await getLlama({ gpu: false, build: "never", maxThreads: availableParallelism(), logLevel: "error" });
const model = await llama.loadModel({ modelPath: join(folder, "model.gguf") });

let outputTokens = 0;
let seconds = 0;
for (const [name, group] of groups) {
  const sequences = Math.min(CONCURRENCY, group.length);
  const context = await model.createContext({
    sequences,
    contextSize: 512,
    batchSize: 1024,
    threads: availableParallelism(),
    ...(name === "base" ? {} : { lora: { adapters: [{ filePath: join(folder, `${name}.gguf`) }] } }),
  });
  const lanes = Array.from({ length: sequences }, () => context.getSequence());
  await answer(lanes, lanes.map(() => ({ prompt_token_ids: Array(100).fill(1), num_output_tokens: 4 })));
  const start = performance.now();
  outputTokens += await answer(lanes, group);
  seconds += (performance.now() - start) / 1000;
  await context.dispose();
}
console.log(JSON.stringify({ output_tokens: outputTokens, seconds }));
process.exit(0);

async function answer(lanes, group) {
  const waiting = [...group];
  let count = 0;
  await Promise.all(
    lanes.map(async (lane) => {
      for (let request = waiting.shift(); request; request = waiting.shift()) {
        await lane.clearHistory();
        let left = request.num_output_tokens;
        const tokens = lane.evaluate(request.prompt_token_ids, { temperature: 0, yieldEogToken: true });
        for await (const _ of tokens) {
          count += 1;
          if (--left === 0) break;
        }
      }
    }),
  );
  return count;
}
