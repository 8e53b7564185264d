"""Measures one adapter against PEFT: `python -m loraserve.control.contents.certificate_child`, a job on stdin."""

import gc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from loraserve.control.contents.certificate import Certificate, CertificateJob, CertificateStatus, skipped
from loraserve.engine.cpu_budget import available_memory_bytes
from loraserve.serving.process.parent_death import die_with_parent
from loraserve.store.blobs import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

PROMPT_TOKENS = 24
NEW_TOKENS = 4
KV_BYTES = 128 << 20
PATTERN_S = 60
"""PEFT matches patterns with `re`, which a pattern that we match in bounded time can still keep busy for ever."""
CLASSIFIERS_OWN = frozenset({"modules_to_save", "id2label", "problem_type"})
"""Fields about the head, and about what its numbers mean."""


class Skipped(Exception):
    """Nothing can be measured; the message says why."""


@dataclass(slots=True)
class Sample:
    """One prompt, and what the engine answers with the adapter."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """Greedy; none of a classifier."""
    rows: "list[Tensor]" = field(default_factory=list)
    """Of each token its log-probabilities [vocab_size]; of a classifier the numbers [num_labels] of the last tokens of
    the prompt. float32."""


@dataclass(slots=True)
class Reference:
    """The whole model with the adapter in it, by PEFT."""

    model: "PreTrainedModel"
    body: "Module"
    """A part of it: see `body_name`."""
    head: "Tensor | None"
    """[num_labels, hidden_size], float32; of a classifier."""

    def numbers(self, token_ids: "Tensor", num_positions: int) -> "Tensor":
        """Logits of the last positions, or their labels' numbers. token_ids: [1, n]."""
        if self.head is None:
            return self.model(input_ids=token_ids, use_cache=False).logits[0, -num_positions:].float()
        hidden = self.body(input_ids=token_ids, use_cache=False).last_hidden_state[0, -num_positions:]
        return hidden.float() @ self.head.T


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
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    _check_memory(job)
    samples, dtype, body = _our_samples(job)
    gc.collect()
    reference = _reference(job, dtype, body)
    found = _compare(job, reference, samples[0])
    for sample in samples[1:]:
        if found.status is CertificateStatus.AGREES:
            break
        found = _compare(job, reference, sample)
    return found


def _compare(job: CertificateJob, reference: Reference, sample: Sample) -> Certificate:
    import peft
    import torch

    from loraserve.models.rounding import logits_tolerance

    ours = torch.stack(sample.rows)
    num_positions, num_columns = ours.shape
    token_ids = torch.tensor([[*sample.prompt, *sample.tokens[:-1]]])

    def compute() -> "Tensor":
        return reference.numbers(token_ids, num_positions)

    numbers = compute()
    tolerance = logits_tolerance(reference.model, numbers, compute)
    theirs = numbers[:, :num_columns]
    expected = torch.log_softmax(theirs, dim=-1) if reference.head is None else theirs
    difference = float((ours - expected).abs().max())
    relative = difference / float(theirs.abs().max())
    return Certificate(
        status=CertificateStatus.AGREES if relative <= tolerance else CertificateStatus.DIFFERS,
        largest_difference=difference,
        relative_difference=relative,
        tolerance=tolerance,
        num_positions=num_positions,
        base_fingerprint=job.base_fingerprint,
        peft_version=peft.__version__,
        measured_at=time.time(),
    )


def _check_memory(job: CertificateJob) -> None:
    import torch
    from loraserve_kernels.choose_backend import choose_backend

    from loraserve.models import loader

    config = loader.load_config(job.engine.model, job.engine.revision)
    device = torch.device("cpu")
    kernel_cache_dir = None if job.engine.kernel_cache_dir is None else Path(job.engine.kernel_cache_dir)
    backend, _ = choose_backend(device, job.engine.backend, kernel_cache_dir)
    dtype = loader.choose_dtype(job.engine.dtype, config, device, backend)
    weight_bytes = loader.num_weight_bytes(config, dtype)
    available = available_memory_bytes()
    if available < job.memory_factor * weight_bytes:
        raise Skipped(
            f"{available / 2**30:.1f} GiB of memory are free, {job.memory_factor:g} times the base's "
            f"{weight_bytes / 2**30:.1f} GiB are needed"
        )


def _our_samples(job: CertificateJob) -> "tuple[list[Sample], Any, str]":
    """With the model's dtype and `body_name`. Of a model of experts there are several, of which one that agrees is
    enough, as in the check of the model."""
    import torch
    from loraserve_adapters.config import SEQ_CLS
    from loraserve_adapters.headless import body_name

    from loraserve.engine.engine import Engine
    from loraserve.engine.request import EngineRequest, LabelActivation, PoolingParams, SamplingParams, to_classify
    from loraserve.models import loader
    from loraserve.models.self_check import NUM_PROBES_OF_EXPERTS

    fields = _config_fields(job)
    invocation = fields["alora_invocation_tokens"] or []
    config = replace(
        job.engine,
        max_model_len=PROMPT_TOKENS + len(invocation) + NEW_TOKENS + 4,
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
    has_experts = any(module.num_matrices is not None for group in description.layout.groups for module in group)
    samples: list[Sample] = []
    for _ in range(NUM_PROBES_OF_EXPERTS if has_experts else 1):
        prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        prompt[PROMPT_TOKENS // 2 : PROMPT_TOKENS // 2] = invocation
        samples.append(Sample(prompt))
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=vocab_size)

    def ask(index: int, prompt: list[int], pooling: PoolingParams | None) -> None:
        engine.add_request(EngineRequest(str(index), prompt, sampling, adapter_digest=job.digest, pooling=pooling))
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise Skipped(f"the engine answered: {output.error}")
                sample = samples[int(output.request_id)]
                sample.tokens += output.token_ids
                if output.pooled is not None:
                    sample.rows.append(torch.frombuffer(bytearray(output.pooled), dtype=torch.float32))
                for entry in output.logprobs or []:
                    row = torch.empty(vocab_size)
                    ids, values = zip(*entry.top, strict=True)
                    row[list(ids)] = torch.tensor(values)
                    sample.rows.append(row)

    for index, sample in enumerate(samples):
        if fields["task_type"] != SEQ_CLS:
            ask(index, sample.prompt, None)
            continue
        for length in range(len(sample.prompt) - NEW_TOKENS + 1, len(sample.prompt) + 1):
            ask(index, sample.prompt[:length], to_classify(LabelActivation.NONE))
    return samples, loader.DTYPES[description.dtype], body_name(description.layout) or ""


def _reference(job: CertificateJob, dtype: Any, body: str) -> Reference:
    """PEFT puts the adapter where it was trained: on the whole model, or on the body alone.

    The model is called as PEFT's own where that is the whole one, which knows from which token on an activated LoRA
    counts. The head of a classifier is none of PEFT's: it is put behind the body.
    """
    import torch
    from loraserve_adapters.config import FEATURE_EXTRACTION, SEQ_CLS
    from loraserve_adapters.judge import HEAD_WEIGHT
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    # Written by us from checked fields; PEFT never reads a tenant's file.
    fields = _config_fields(job)
    tensors = load_file(Path(job.blob) / WEIGHTS_FILE)
    head = None
    if fields["task_type"] == SEQ_CLS:
        head = tensors[HEAD_WEIGHT].float()
        fields = {name: value for name, value in fields.items() if name not in CLASSIFIERS_OWN} | {"task_type": None}
    weights = {
        name: tensor.to(torch.float32 if name.endswith(".lora_magnitude_vector") else dtype)
        for name, tensor in tensors.items()
        if "lora_" in name  # copies of the base's, which may be rounded here
    }
    if fields.get("use_rslora") and any(".experts.0." in name for name in weights):
        raise Skipped("PEFT scales rsLoRA of linears that experts no longer have by other ranks than in training")
    model = _base_model(job, dtype)
    signal.signal(signal.SIGALRM, _patterns_take_too_long)
    signal.alarm(PATTERN_S)
    place = body if fields["task_type"] == FEATURE_EXTRACTION else ""
    trained, config = model.get_submodule(place), LoraConfig(**{**fields, "inference_mode": False})
    peft_model = get_peft_model(cast("PreTrainedModel", trained), config, autocast_adapter_dtype=False)
    signal.alarm(0)
    for name, parameter in peft_model.named_parameters():
        if ".lora_magnitude_vector" in name:  # as they are served; PEFT itself trains them so
            parameter.data = parameter.data.float()
    result = set_peft_model_state_dict(peft_model, weights)
    if result.unexpected_keys:
        raise Skipped(f"PEFT does not know the tensor {result.unexpected_keys[0]}")
    peft_model.eval()
    return Reference(model if place else cast("PreTrainedModel", peft_model), model.get_submodule(body), head)


def _config_fields(job: CertificateJob) -> dict[str, Any]:
    return {"alora_invocation_tokens": None} | json.loads((Path(job.blob) / CONFIG_FILE).read_bytes())


def _base_model(job: CertificateJob, dtype: Any) -> "PreTrainedModel":
    from loraserve_kernels.quantization import Quantization

    from loraserve.models import loader
    from loraserve.models.quantized_weights import round_weights
    from loraserve.models.stored_experts import names_of_stored

    config = loader.load_config(job.engine.model, job.engine.revision)
    if job.engine.load_format == "dummy":
        model = loader.dummy_model(config, dtype, job.engine.seed)
    else:
        model = loader.load_model(job.engine.model, job.engine.revision, config, dtype).model
    if job.engine.quantization != "none":
        is_dummy = job.engine.load_format == "dummy"
        stored = frozenset() if is_dummy else names_of_stored(job.engine.model, job.engine.revision)
        round_weights(model, Quantization(job.engine.quantization), stored)
    return model


def _patterns_take_too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise Skipped(f"PEFT took longer than {PATTERN_S} s to find the adapter's modules")


if __name__ == "__main__":
    sys.exit(main())
