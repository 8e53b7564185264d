"""Time that the engine adds to a step's forward pass, at several batch sizes and contexts. One JSON line per case.

Covers scheduling, building the batch, sampling, bookkeeping and messages: runs the engine process's own loop over a
socket pair that is read between the steps. Uses the base model: a step with adapters takes longer but adds the same
time. Greedy unless the options say otherwise.

Run: python benchmarks/bench_step_overhead.py --model benchmarks/out/llama-100m
"""

import argparse
import json
import socket
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from in_process import start_engine
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.step_batch import StepBatch

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.request import EngineRequest, Grammar, GrammarKind, SamplingParams
from loraserve.engine.steps.model_runner import ModelRunner
from loraserve.serving.process.engine_loop import EngineLoop
from loraserve.serving.process.engine_process import SocketChannel
from loraserve.serving.process.framing import encode_frame
from loraserve.serving.process.messages import AddRequest

CASES = [(16, 128), (64, 128), (16, 1920)]
"""(sequences, prompt tokens)."""
STEPS = 48
RECEIVE_BYTES = 1 << 20


class TimedForward:
    """Stands in for `ModelRunner.forward` and records its time and its batch's size."""

    def __init__(self, forward: Callable[[StepBatch, StepArrivals | None], ModelOutput]) -> None:
        self._forward = forward
        self.seconds = 0.0
        self.num_rows = 0
        self.num_sampled_rows = 0

    def __call__(self, batch: StepBatch, arrivals: StepArrivals | None = None) -> ModelOutput:
        start = perf_counter()
        output = self._forward(batch, arrivals)
        self.seconds = perf_counter() - start
        self.num_rows, self.num_sampled_rows = len(batch.token_ids), len(batch.sampled_rows)
        return output


class Bench:
    def __init__(self, model: Path, temperature: float, top_k: int, top_p: float, regex: str | None) -> None:
        self._sampling = SamplingParams(
            max_tokens=STEPS,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            ignore_eos=True,
            grammar=None if regex is None else Grammar(GrammarKind.REGEX, regex),
        )
        engine = start_engine(model, enable_lora=False)
        runner: ModelRunner = engine._runner
        self._forward = TimedForward(runner.forward)
        runner.forward = self._forward
        self._has_work = engine.has_work
        ours, self._peer = socket.socketpair()
        self._loop = EngineLoop(engine, SocketChannel(ours))

    def measure(self, num_sequences: int, num_prompt: int) -> dict[str, float]:
        """Medians over decode steps in which every sequence takes part."""
        requests = [
            EngineRequest(
                f"{num_sequences}-{num_prompt}-{i}", [2 + i, *[1 + i % 97] * (num_prompt - 1)], self._sampling
            )
            for i in range(num_sequences)
        ]
        self._peer.sendall(b"".join(encode_frame(AddRequest(request)) for request in requests))
        self._loop.run_once(0)
        self._peer.recv(RECEIVE_BYTES)
        steps, overheads = [], []
        while self._has_work():
            start = perf_counter()
            self._loop.run_once(0)
            seconds = perf_counter() - start
            self._peer.recv(RECEIVE_BYTES)
            if self._forward.num_rows == self._forward.num_sampled_rows == num_sequences:
                steps.append(seconds * 1000)
                overheads.append((seconds - self._forward.seconds) * 1000)
        step_ms, overhead_ms = statistics.median(steps), statistics.median(overheads)
        return {
            "sequences": num_sequences,
            "prompt_tokens": num_prompt,
            "steps": len(steps),
            "step_ms": step_ms,
            "overhead_ms": overhead_ms,
            "share": overhead_ms / step_ms,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--regex", help="Constrain outputs to it; for example '[a-z ]{2000}'.")
    args = parser.parse_args()
    bench = Bench(args.model, args.temperature, args.top_k, args.top_p, args.regex)
    for case in CASES:
        print(json.dumps(bench.measure(*case)), flush=True)


if __name__ == "__main__":
    main()
