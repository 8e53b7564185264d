"""The library arms: PEFT `generate(adapter_names=…)` and transformers `generate` over static batches of 16.

Prints one JSON line. A batch runs until its longest request is done; only tokens that were asked for count.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from workload import WorkItem, make_work

BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="*", default=[])
    parser.add_argument("--num-requests", type=int, required=True)
    parser.add_argument("--spread", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    names = [path.name for path in args.adapters]
    if names:
        model = PeftModel.from_pretrained(model, str(args.adapters[0]), adapter_name=names[0])
        for path in args.adapters[1:]:
            model.load_adapter(str(path), adapter_name=path.name)
        model.eval()
    work = make_work(
        num_requests=args.num_requests,
        num_adapters=len(names),
        vocab_size=model.config.vocab_size - 1,
        spread=args.spread,
    )
    _generate(model, names, make_work(num_requests=BATCH_SIZE, num_adapters=len(names), vocab_size=100, output_mean=4))
    start = time.perf_counter()
    num_tokens = sum(_generate(model, names, work[i : i + BATCH_SIZE]) for i in range(0, len(work), BATCH_SIZE))
    seconds = time.perf_counter() - start
    print(json.dumps({"output_tokens": num_tokens, "seconds": seconds, "output_tokens_per_s": num_tokens / seconds}))


def _generate(model: Any, names: list[str], batch: list[WorkItem]) -> int:
    longest = max(len(item.prompt_token_ids) for item in batch)
    num_new = max(item.num_output_tokens for item in batch)
    input_ids = torch.zeros((len(batch), longest), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, item in enumerate(batch):
        input_ids[row, longest - len(item.prompt_token_ids) :] = torch.tensor(item.prompt_token_ids)
        attention_mask[row, longest - len(item.prompt_token_ids) :] = 1
    extra = {"adapter_names": [names[item.adapter] for item in batch if item.adapter is not None]} if names else {}
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            **extra,
        )
    assert output.shape[1] == longest + num_new, f"{output.shape[1] - longest} tokens instead of {num_new}"
    return sum(item.num_output_tokens for item in batch)


if __name__ == "__main__":
    main()
