"""Measures one adapter against PEFT: `python -m loraserve.control.contents.certificate_child`, a job on stdin."""

import gc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from loraserve.control.contents.certificate import Certificate, CertificateJob, CertificateStatus, skipped
from loraserve.engine.cpu_budget import available_memory_bytes
from loraserve.serving.process.parent_death import die_with_parent
from loraserve.store.blobs import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PROMPT_TOKENS = 24
NEW_TOKENS = 4
KV_BYTES = 128 << 20
PATTERN_S = 60
"""PEFT matches patterns with `re`, which a pattern that we match in bounded time can still keep busy for ever."""


class Skipped(Exception):
    """Nothing can be measured; the message says why."""


def main() -> int:
    os.nice(19)
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CertificateJob)
    try:
        certificate = measure(job)
    except Skipped as reason:
        certificate = skipped(job, str(reason))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(certificate))
    sys.stdout.buffer.flush()
    # Nothing is left to save, and taking torch down in order takes long.
    os._exit(0)


def measure(job: CertificateJob) -> Certificate:
    """Raises `Skipped`."""
    if job.engine.device != "cpu":
        raise Skipped("it is measured on CPUs only")
    if importlib.util.find_spec("peft") is None:
        raise Skipped("peft is not installed")
    import peft
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    _check_memory(job)
    prompt, tokens, ours, dtype = _our_logprobs(job)
    gc.collect()
    theirs, tolerance = _peft_logits(job, [*prompt, *tokens[:-1]], len(tokens), dtype)
    theirs = theirs[:, : ours.shape[1]]
    difference = float((ours - torch.log_softmax(theirs, dim=-1)).abs().max())
    relative = difference / float(theirs.abs().max())
    return Certificate(
        status=CertificateStatus.AGREES if relative <= tolerance else CertificateStatus.DIFFERS,
        largest_difference=difference,
        relative_difference=relative,
        tolerance=tolerance,
        num_positions=len(tokens),
        base_fingerprint=job.base_fingerprint,
        peft_version=peft.__version__,
        measured_at=time.time(),
    )


def _check_memory(job: CertificateJob) -> None:
    import torch
    from loraserve_kernels.choose_backend import choose_backend
    from transformers import AutoModelForCausalLM

    from loraserve.models import loader

    config = loader.load_config(job.engine.model, job.engine.revision)
    device = torch.device("cpu")
    kernel_cache_dir = None if job.engine.kernel_cache_dir is None else Path(job.engine.kernel_cache_dir)
    backend, _ = choose_backend(device, job.engine.backend, kernel_cache_dir)
    dtype = loader.choose_dtype(job.engine.dtype, config, device, backend)
    with torch.device("meta"):
        weight_bytes = sum(p.nbytes for p in AutoModelForCausalLM.from_config(config, dtype=dtype).parameters())
    available = available_memory_bytes()
    if available < job.memory_factor * weight_bytes:
        raise Skipped(
            f"{available / 2**30:.1f} GiB of memory are free, {job.memory_factor:g} times the base's "
            f"{weight_bytes / 2**30:.1f} GiB are needed"
        )


def _our_logprobs(job: CertificateJob) -> "tuple[list[int], list[int], Tensor, Any]":
    """(prompt, greedy tokens, their log-probabilities over the vocabulary, the model's dtype)."""
    import torch

    from loraserve.engine.engine import Engine
    from loraserve.engine.request import EngineRequest, SamplingParams
    from loraserve.models import loader

    config = replace(
        job.engine,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS + 4,
        kv_cache_memory_bytes=KV_BYTES,
        adapter_memory_bytes=Path(job.packed_path).stat().st_size + (1 << 20),
        max_num_seqs=2,
        num_threads=1,
        enable_lora=True,
    )
    engine = Engine(config, lambda *_: None)
    description = engine.describe()
    if description.layout.fingerprint != job.base_fingerprint:
        raise Skipped("the base model on the disk is not the served one any more")
    engine.load_adapter(job.digest, job.packed_path)
    vocab_size = description.vocab_size
    rng = random.Random(job.digest)
    prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=vocab_size)
    engine.add_request(EngineRequest("certificate", prompt, sampling, adapter_digest=job.digest))
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise Skipped(f"the engine answered: {output.error}")
            tokens += output.token_ids
            for entry in output.logprobs or []:
                row = torch.empty(vocab_size)
                ids, values = zip(*entry.top, strict=True)
                row[list(ids)] = torch.tensor(values)
                rows.append(row)
    return prompt, tokens, torch.stack(rows), loader.DTYPES[description.dtype]


def _peft_logits(job: CertificateJob, tokens: Sequence[int], num_rows: int, dtype: Any) -> "tuple[Tensor, float]":
    """What PEFT's model answers at the last positions, [num_rows, columns] float32, and `logits_tolerance` of it."""
    import torch
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    from loraserve.models.rounding import logits_tolerance

    # Written by us from checked fields; PEFT never reads a tenant's file.
    fields = json.loads((Path(job.blob) / CONFIG_FILE).read_bytes())
    model = _base_model(job, dtype)
    signal.signal(signal.SIGALRM, _patterns_take_too_long)
    signal.alarm(PATTERN_S)
    peft_model = get_peft_model(model, LoraConfig(**{**fields, "inference_mode": False}), autocast_adapter_dtype=False)
    signal.alarm(0)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(Path(job.blob) / WEIGHTS_FILE).items()}
    result = set_peft_model_state_dict(peft_model, weights)
    if result.unexpected_keys:
        raise Skipped(f"PEFT does not know the tensor {result.unexpected_keys[0]}")
    peft_model.eval()

    def compute() -> "Tensor":
        return peft_model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -num_rows:].float()

    logits = compute()
    return logits, logits_tolerance(model, logits, compute)


def _base_model(job: CertificateJob, dtype: Any) -> "PreTrainedModel":
    from loraserve.models import loader

    config = loader.load_config(job.engine.model, job.engine.revision)
    if job.engine.load_format == "dummy":
        return loader.dummy_model(config, dtype, job.engine.seed)
    return loader.load_model(job.engine.model, job.engine.revision, config, dtype)


def _patterns_take_too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise Skipped(f"PEFT took longer than {PATTERN_S} s to find the adapter's modules")


if __name__ == "__main__":
    sys.exit(main())
