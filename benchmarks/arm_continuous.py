"""transformers' continuous batching, 16 requests at a time, each with its own length. Prints one JSON line.

Calls the manager behind `generate_batch` directly, because `generate_batch` takes one length for all requests. It
serves one model: the base, or the base with an adapter merged into it, which costs the same.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from requests_file import Request, read_requests
from rival_dtype import rival_dtype
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

CONCURRENCY = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=rival_dtype(), attn_implementation="sdpa"
    ).eval()
    requests = read_requests(args.requests)
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=CONCURRENCY, num_blocks=256),
    ) as manager:
        _answer(manager, [Request(request.model, [1] * 100, 4) for request in requests[:CONCURRENCY]])
        start = time.perf_counter()
        num_tokens = _answer(manager, requests)
        seconds = time.perf_counter() - start
    print(json.dumps({"output_tokens": num_tokens, "seconds": seconds}))


def _answer(manager: Any, requests: list[Request]) -> int:
    for request in requests:
        manager.add_request(request.prompt_token_ids, max_new_tokens=request.num_output_tokens)
    num_tokens = num_finished = 0
    while num_finished < len(requests):
        output = manager.get_result(timeout=60)
        assert output is not None, "no answer within 60 s"
        assert output.error is None, output.error
        if output.is_finished():
            num_finished += 1
            num_tokens += len(output.generated_tokens)
    return num_tokens


if __name__ == "__main__":
    main()
