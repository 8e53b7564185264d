"""Measures one adapter against PEFT: `python -m loraserve.control.contents.certificate_child` with a job on stdin."""

import gc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec
from loraserve_adapters.source_module import KEY_PREFIX
from loraserve_adapters.trained_tokens import FIELD, ROWS

from loraserve.control.contents.certificate import Certificate, CertificateJob, CertificateStatus, skipped
from loraserve.engine.cpu_budget import available_memory_bytes
from loraserve.serving.process.parent_death import die_with_parent
from loraserve.store.blobs import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from loraserve_adapters.base_layout import BaseLayout
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

    from loraserve.engine.model_description import ModelDescription

PROMPT_TOKENS = 24
NEW_TOKENS = 4
PATTERN_S = 60
"""PEFT matches patterns with `re`, which can hang forever on a pattern that we match in bounded time."""
ADAPTER_MEMORY_FACTOR = 2
"""Measured with whole tables, the largest parts of an adapter: 1.5 times its packed size."""
HEAD_TOLERANCE = 1e-5
"""As a share of the sum of |products| that make up a number; they are computed in float32."""
CLASSIFIER_FIELDS = frozenset({"modules_to_save", "id2label", "problem_type", "score_template"})
"""Fields about the head and the meaning of its numbers."""
LORASERVE_FIELDS = frozenset({"chat_template"})
"""Fields that PEFT does not know, and that do not affect what is compared."""


class Skipped(Exception):
    """Nothing can be measured; the message says why."""


@dataclass(slots=True)
class Sample:
    """One prompt, and the engine's answer with the adapter."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """Greedy; empty for a classifier."""
    rows: "list[Tensor]" = field(default_factory=list)
    """Log-probabilities [vocab_size] for each token; for a classifier the vectors [hidden_size] of the prompt's last
    tokens, because the numbers of a few labels may all be near 0. float32."""
    is_head_right: bool = True
    """For a classifier: whether its numbers are what its head computes from these vectors."""


@dataclass(slots=True)
class Reference:
    """The whole model with the adapter, built by PEFT."""

    model: "PreTrainedModel"
    body: "Module | None"
    """A part of it, see `body_name`, if only that is compared: for a classifier."""

    def numbers(self, token_ids: "Tensor", num_positions: int) -> "Tensor":
        """Logits of the last positions, or their hidden states. token_ids: [1, n]."""
        if self.body is None:
            return self.model(input_ids=token_ids, use_cache=False).logits[0, -num_positions:].float()
        return self.body(input_ids=token_ids, use_cache=False).last_hidden_state[0, -num_positions:].float()


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
    # Nothing is left to save, and shutting torch down in order takes long.
    os._exit(0)


def measure(job: CertificateJob) -> Certificate:
    """Raises `Skipped`."""
    if job.engine.device != "cpu":
        raise Skipped("it is measured on CPUs only")
    if importlib.util.find_spec("peft") is None:
        raise Skipped("peft is not installed")
    import torch

    from loraserve.models.loader import DTYPES

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    _check_memory(job)
    samples, description = _our_samples(job)
    gc.collect()
    reference = _reference(job, DTYPES[description.dtype], description.layout, keeps_stored=description.keeps_stored)
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
    expected = torch.log_softmax(theirs, dim=-1) if reference.body is None else theirs
    difference = float((ours - expected).abs().max())
    relative = difference / float(theirs.abs().max())
    is_same = relative <= tolerance and sample.is_head_right
    return Certificate(
        status=CertificateStatus.AGREES if is_same else CertificateStatus.DIFFERS,
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
    adapter_bytes = Path(job.packed_path).stat().st_size
    if available < job.memory_factor * weight_bytes + ADAPTER_MEMORY_FACTOR * adapter_bytes:
        raise Skipped(
            f"{available / 2**30:.1f} GiB of memory are free, but {job.memory_factor:g} times the base's "
            f"{weight_bytes / 2**30:.1f} GiB and {ADAPTER_MEMORY_FACTOR} times the adapter's "
            f"{adapter_bytes / 2**30:.1f} GiB are needed"
        )


def _our_samples(job: CertificateJob) -> "tuple[list[Sample], ModelDescription]":
    """For a mixture of experts there are several samples, of which one that agrees is enough, as in the check of the
    model."""
    import torch
    from loraserve_adapters.config import SEQ_CLS

    from loraserve.engine.engine import Engine
    from loraserve.engine.request import (
        EngineRequest,
        LabelActivation,
        Pooling,
        PoolingParams,
        SamplingParams,
        to_classify,
    )
    from loraserve.models.self_check import NUM_PROBES_OF_EXPERTS

    fields = _config_fields(job)
    invocation = fields["alora_invocation_tokens"] or []
    config = replace(
        job.engine,
        max_model_len=PROMPT_TOKENS + len(invocation) + NEW_TOKENS + 4,
        kv_cache_memory_bytes=None,
        enable_prefix_caching=False,
        adapter_memory_bytes=Path(job.packed_path).stat().st_size + (1 << 20),
        max_num_seqs=2,
        num_threads=1,
        enable_lora=True,
    )
    engine = Engine(config, lambda *_: None)
    description = engine.describe()
    if description.layout.fingerprint != job.base_fingerprint:
        raise Skipped("the base model on disk is no longer the one that is served")
    engine.load_adapter(job.digest, job.packed_path)
    vocab_size = description.vocab_size
    rng = random.Random(job.digest)
    has_experts = any(module.num_matrices is not None for group in description.layout.groups for module in group)
    samples: list[Sample] = []
    trained = [token_id for token_id in _trained_tokens(fields) if token_id < vocab_size][: PROMPT_TOKENS // 2]
    for _ in range(NUM_PROBES_OF_EXPERTS if has_experts else 1):
        prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        prompt[: len(trained)] = trained
        prompt[PROMPT_TOKENS // 2 : PROMPT_TOKENS // 2] = invocation
        samples.append(Sample(prompt))
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=vocab_size)

    def answers(sample: Sample, prompt: list[int], pooling: PoolingParams | None) -> Iterator["Tensor"]:
        """Rows of log-probabilities, or the pooled vector."""
        engine.add_request(EngineRequest("0", prompt, sampling, adapter_digest=job.digest, pooling=pooling))
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise Skipped(f"the engine reported an error: {output.error}")
                sample.tokens += output.token_ids
                if output.pooled is not None:
                    yield torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)
                for entry in output.logprobs or []:
                    row = torch.empty(vocab_size)
                    ids, values = zip(*entry.top, strict=True)
                    row[list(ids)] = torch.tensor(values)
                    yield row

    head = _head(job) if fields["task_type"] == SEQ_CLS else None
    for sample in samples:
        if head is None:
            sample.rows = [*answers(sample, sample.prompt, None)]
            continue
        for length in range(len(sample.prompt) - NEW_TOKENS + 1, len(sample.prompt) + 1):
            (vector,) = answers(sample, sample.prompt[:length], PoolingParams(Pooling.LAST, normalize=False))
            (numbers,) = answers(sample, sample.prompt[:length], to_classify(LabelActivation.NONE))
            sample.rows.append(vector)
            off_by = (numbers - head @ vector).abs()
            sample.is_head_right &= bool((off_by <= HEAD_TOLERANCE * (head.abs() @ vector.abs())).all())
    return samples, description


def _reference(job: CertificateJob, dtype: Any, layout: "BaseLayout", *, keeps_stored: bool = False) -> Reference:
    """PEFT puts the adapter where it was trained: on the whole model, or on the body alone. It finds modules by their
    names in the class that was trained.

    On the whole model, PEFT's wrapper is called, because it knows from which token on an activated LoRA applies. For a
    classifier the body is compared: PEFT does not get its head.
    """
    import torch
    from loraserve_adapters.config import FEATURE_EXTRACTION, SEQ_CLS
    from loraserve_adapters.headless import body_name
    from loraserve_adapters.other_class import decoder_prefixes, names_other_class, other_class, renamed
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from peft.utils import ModulesToSaveWrapper
    from safetensors.torch import load_file

    from loraserve.control.contents.class_names import named_as_other_class

    # Written by us from checked fields; PEFT never reads a tenant's file.
    fields = {name: value for name, value in _config_fields(job).items() if name not in LORASERVE_FIELDS}
    is_classifier = fields["task_type"] == SEQ_CLS
    tensors = load_file(Path(job.blob) / WEIGHTS_FILE)
    if fields.get("use_rslora") and any(".experts.0." in name for name in tensors):
        raise Skipped("PEFT scales rsLoRA of linears that experts no longer have by different ranks than in training")
    other = other_class(layout) if names_other_class(tensors, layout) else None
    served, trained_on = (decoder_prefixes(layout) if other is not None else None) or ("", "")
    own_tables = _own_tables(job, other or layout)
    place = ""
    if fields["task_type"] == FEATURE_EXTRACTION:
        place = served.removesuffix(".") or body_name(layout) or ""
        if other is not None and other.lacks_modules:
            raise Skipped("it was trained on another class of the model, which also takes images, without its head")
    if is_classifier:
        fields = {name: value for name, value in fields.items() if name not in CLASSIFIER_FIELDS} | {"task_type": None}
        fields["modules_to_save"] = [*own_tables] or None
        fields["ensure_weight_tying"] = False  # PEFT would also tie the causal model's lm_head
    weights = {
        name: tensor.to(torch.float32 if name.endswith(".lora_magnitude_vector") else dtype)
        for name, tensor in tensors.items()
        if "lora_" in name or name.endswith(ROWS)  # without copies of base weights, which may be rounded here
    }
    tables = {name: tensors[name].to(dtype) for name in (f"{KEY_PREFIX}{module}.weight" for module in own_tables)}
    prefixes = f"{KEY_PREFIX}{trained_on}", f"{KEY_PREFIX}{served}"
    weights, tables = ({renamed(name, *prefixes): named[name] for name in named} for named in (weights, tables))
    del tensors
    model = _base_model(job, dtype, keeps_stored=keeps_stored)
    signal.signal(signal.SIGALRM, _patterns_take_too_long)
    signal.alarm(PATTERN_S)
    trained, config = model.get_submodule(place), LoraConfig(**{**fields, "inference_mode": False})
    with named_as_other_class(model, layout) if other is not None and not place else nullcontext():
        peft_model = get_peft_model(cast("PreTrainedModel", trained), config, autocast_adapter_dtype=False)
    signal.alarm(0)
    for name, parameter in peft_model.named_parameters():
        if ".lora_magnitude_vector" in name:  # float32 as served; PEFT itself trains them so
            parameter.data = parameter.data.float()
    # Not into a table that PEFT leaves to the base: the certificate is to notice if we do not.
    saved = {
        f"{name}.weight" for name, module in peft_model.named_modules() if isinstance(module, ModulesToSaveWrapper)
    }
    weights |= {name: table for name, table in tables.items() if name in saved}
    result = set_peft_model_state_dict(peft_model, weights)
    # For a tied `lm_head`, PEFT leaves the tokens' rows out, because they are the embedding's.
    copies = [name for name in result.unexpected_keys if name.endswith(ROWS)]
    knows_rows = len(copies) < sum(name.endswith(ROWS) for name in weights)
    if unknown := [name for name in result.unexpected_keys if name not in copies or not knows_rows]:
        raise Skipped(f"PEFT does not know the tensor {unknown[0]}")
    peft_model.eval()
    whole = model if place else cast("PreTrainedModel", peft_model)
    return Reference(whole, model.get_submodule(body_name(layout) or "") if is_classifier else None)


def _head(job: CertificateJob) -> "Tensor":
    """[num_labels, hidden_size], float32."""
    from loraserve_adapters.source_module import HEAD_WEIGHT
    from safetensors.torch import load_file

    return load_file(Path(job.blob) / WEIGHTS_FILE)[HEAD_WEIGHT].float()


def _config_fields(job: CertificateJob) -> dict[str, Any]:
    stated = json.loads((Path(job.blob) / CONFIG_FILE).read_bytes())
    return {"alora_invocation_tokens": None, "task_type": None} | stated


def _own_tables(job: CertificateJob, layout: "BaseLayout") -> list[str]:
    """Modules whose whole table is the adapter's own. layout: with the names of the class that was trained."""
    if not _config_fields(job).get("modules_to_save"):
        return []
    from loraserve_adapters.config import FEATURE_EXTRACTION, parse_config
    from loraserve_adapters.headless import without_head, without_lm_head
    from loraserve_adapters.own_tables import resolve_own_tables

    config = parse_config((Path(job.blob) / CONFIG_FILE).read_bytes())
    if config.is_classifier:
        layout = without_lm_head(layout)
    elif config.task_type == FEATURE_EXTRACTION:
        layout = without_head(layout)
    return [own.module.name for own in resolve_own_tables(config, layout)]


def _trained_tokens(fields: dict[str, Any]) -> list[int]:
    """Ids of tokens whose rows are the adapter's."""
    tokens = fields.get(FIELD) or []
    return [token_id for ids in tokens.values() for token_id in ids] if isinstance(tokens, dict) else tokens


def _base_model(job: CertificateJob, dtype: Any, *, keeps_stored: bool) -> "PreTrainedModel":
    from loraserve_kernels.quantization import Quantization

    from loraserve.models import loader
    from loraserve.models.quantized_weights import round_weights

    config = loader.load_config(job.engine.model, job.engine.revision)
    if job.engine.load_format == "dummy":
        model = loader.dummy_model(config, dtype, job.engine.seed)
    else:
        model = loader.load_model(job.engine.model, job.engine.revision, config, dtype).model
    stored = loader.stored_weights(job.engine.model, job.engine.revision, config, dtype) if keeps_stored else {}
    if job.engine.quantization != "none" or stored:
        quantization = None if job.engine.quantization == "none" else Quantization(job.engine.quantization)
        round_weights(model, quantization, stored)
    return model


def _patterns_take_too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise Skipped(f"PEFT took longer than {PATTERN_S} s to find the adapter's modules")


if __name__ == "__main__":
    sys.exit(main())
