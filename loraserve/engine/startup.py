"""Turns an `EngineConfig` into a model ready to run: load, size memory, prove, swap."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from loraserve_adapters.packed import ALIGNMENT_BYTES
from loraserve_kernels.attention_work import splits_for_device
from loraserve_kernels.backend import Backend, KernelTooLargeError
from loraserve_kernels.c_compiler import CompilerUnavailable
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.quantization import Quantization
from transformers import GenerationConfig, PreTrainedConfig

from loraserve.engine import malloc
from loraserve.engine.adapters.host_tier import choose_host_tier_bytes, locked_bytes
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.config import EngineConfig
from loraserve.engine.cpu_budget import available_cpus, available_memory_bytes
from loraserve.engine.device.accelerator import Accelerator, accelerator_of, choose_device
from loraserve.engine.errors import EngineStartError
from loraserve.engine.gpu_memory import OUT_OF_MEMORY_ADVICE, GpuMemory, activation_bytes, compile_sampling
from loraserve.engine.grammars.compiler import Grammars
from loraserve.engine.kv.cache_dtype import choose_kv_cache_dtype
from loraserve.engine.memory_plan import (
    GPU_SHARES,
    MemoryPlan,
    host_shares,
    plan_memory,
)
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.pooling_defaults import PoolingDefaults, pooling_defaults
from loraserve.engine.scheduling.drafter import FreeRows
from loraserve.engine.steps.batch_builder import BatchBuilder
from loraserve.engine.steps.gpu_batch_builder import GpuBatchBuilder
from loraserve.engine.steps.graphs import NO_GRAPHS, CaptureError, GraphSizes, StepGraphs
from loraserve.engine.steps.model_runner import ModelRunner
from loraserve.engine.steps.work_lists import WorkLists
from loraserve.engine.vocabulary import Vocabulary, read_vocabulary
from loraserve.engine.weight_formats import (
    check_memory,
    checkpoint_notes,
    choose_quantization,
    dtype_name,
    keeps_stored,
    majority_format,
    quantization_notes,
)
from loraserve.models import loader
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.stored_weights import StoredWeights

Progress = Callable[[str, int, int], None]
"""(phase, done, total)."""

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of generation_config that become defaults, as in vLLM."""
HEADLESS_NOTE = (
    "the model was saved without an lm_head and cannot generate text: use /v1/embeddings, /v1/classify, /v1/rerank or "
    "/v1/score"
)
SINGLE_THREAD_WEIGHT_BYTES = 16 << 20
KERNEL_TOO_LARGE_ADVICE = (
    "choose --dtype bfloat16 or float16 instead of float32, another GPU, or --backend reference, which is slow"
)
DEFAULT_NUM_SPECULATIVE_TOKENS = 16
DEFAULT_MODEL_MAX_LEN = 2048
"""For a config that names no limit."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    description: ModelDescription
    backend: Backend
    accelerator: Accelerator | None
    """None on a CPU."""
    builder: BatchBuilder
    runner: ModelRunner
    adapters: AdapterMemory | None
    grammars: Grammars
    free_rows: FreeRows
    num_state_slots: int
    """Of recurrent states; 0 for a model without any."""
    logits_size: int
    """Columns of the logits, at least vocab_size."""


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """What the model's files say, weights aside."""

    config: PreTrainedConfig
    vocabulary: Vocabulary
    default_sampling: dict[str, float | int]
    pooling: PoolingDefaults


def start(config: EngineConfig, progress: Progress) -> EngineParts:
    """Raises `EngineStartError`."""
    try:
        return _start(config, progress)
    except ModelRefusedError as error:
        raise EngineStartError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise EngineStartError(f"the GPU does not have enough memory: {OUT_OF_MEMORY_ADVICE} ({error})") from error
    except KernelTooLargeError as error:
        raise EngineStartError(f"{error}: {KERNEL_TOO_LARGE_ADVICE}") from error
    except torch.AcceleratorError as error:
        raise EngineStartError(f"the GPU failed; starting again may help ({error})") from error


def _start(config: EngineConfig, progress: Progress) -> EngineParts:
    torch.set_grad_enabled(False)
    device = _device(config)
    accelerator = accelerator_of(device)
    quantization = choose_quantization(config, accelerator)
    chosen_kv_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, accelerator)
    files = _read_files(config)
    vocabulary = files.vocabulary
    # Reads the tokenizer in a thread while weights are loaded.
    grammars = Grammars(loader.without_gaps(vocabulary.tokenizer_json, vocabulary.token_ids), vocabulary.ending_ids)
    backend, backend_note = _backend(config, device)
    dtype = loader.choose_dtype(config.dtype, files.config, device, backend)
    stored: StoredWeights = {}
    if keeps_stored(config, device, dtype, backend, quantization):
        stored = loader.stored_weights(config.model, config.revision, files.config, dtype)
    form = majority_format(files.config, dtype, stored) or quantization  # determines the cost of drafts
    is_recurrent = loader.is_recurrent(files.config)
    if is_recurrent and device.type != "cpu":
        raise EngineStartError(
            f"{config.model} has recurrent layers, which run on CPUs alone, not on {device}: start with --device cpu"
        )
    num_draft_tokens = _num_speculative_tokens(config, files.config, backend, dtype, form, is_recurrent=is_recurrent)
    available_bytes = available_memory_bytes()
    host_tier_bytes = choose_host_tier_bytes(config.adapter_host_memory_bytes, accelerator, available_bytes)
    gpu_memory = None if accelerator is None else GpuMemory(accelerator, config.gpu_memory_utilization)
    malloc.return_large_blocks()
    loaded = _load_weights(config, files.config, device, dtype, progress, stored)
    model = CausalModel(loaded.model, backend, quantization, stored, available_memory_bytes() if stored else None)
    kv_dtype = chosen_kv_dtype or model.dtype
    torch.set_num_threads(config.num_threads or _num_threads(model))
    # Weights mapped from their file take memory only once they are packed, so what is available now is an overestimate.
    host_bytes = max(available_bytes - model.weight_bytes, 0)
    plan = _plan(config, model, kv_dtype, files.config, host_bytes if gpu_memory is None else gpu_memory.left_bytes())
    config = replace(config, max_num_seqs=plan.max_num_seqs)
    vocab_size = vocabulary.size_for(model.logits_size)
    model.prepare(plan.max_model_len, vocab_size, lambda done, total: progress("prepacking weights", done, total))
    malloc.keep_large_blocks()
    if accelerator is not None and gpu_memory is not None:
        num_bytes = _activation_bytes(config, model, kv_dtype, accelerator, progress)
        compile_sampling(backend, model, vocab_size)
        plan = _plan(config, model, kv_dtype, files.config, gpu_memory.left_bytes(num_bytes))
    adapters = None
    if config.enable_lora:
        adapters = _adapter_memory(model, plan.arena_size_bytes, accelerator, host_tier_bytes)
    table = None if adapters is None else adapters.table
    runner = ModelRunner(model, plan.num_blocks, config.block_size, table, device, kv_dtype, plan.num_state_slots)
    own_tables = {} if table is None else table.own_tables
    builder = _builder(config, plan, model, backend, accelerator, runner, own_tables, progress)
    notes = _notes(config, files, loaded, model, quantization, backend, backend_note, plan, adapters)
    description = _describe(
        config, files, loaded, model, device, backend, kv_dtype, plan, vocab_size, num_draft_tokens, adapters, notes
    )
    free_rows = _free_rows(model, backend, files.config, form)
    return EngineParts(
        description,
        backend,
        accelerator,
        builder,
        runner,
        adapters,
        grammars,
        free_rows,
        plan.num_state_slots,
        model.logits_size,
    )


def _read_files(config: EngineConfig) -> _ModelFiles:
    model_config = loader.load_config(config.model, config.revision)
    tokenizer_source = config.tokenizer or config.model
    tokenizer = loader.load_tokenizer(tokenizer_source, config.revision)
    template = loader.load_processor_template(tokenizer_source, config.revision)
    generation_config = loader.load_generation_config(config.model, config.revision)
    pooling = pooling_defaults(config.model, config.revision)
    vocabulary = read_vocabulary(tokenizer, model_config, generation_config, config.turn_end_tokens, template)
    default_sampling = {} if config.generation_config == "vllm" else _default_sampling(generation_config)
    return _ModelFiles(model_config, vocabulary, default_sampling, pooling)


def _describe(
    config: EngineConfig,
    files: _ModelFiles,
    loaded: loader.LoadedModel,
    model: CausalModel,
    device: torch.device,
    backend: Backend,
    kv_dtype: torch.dtype,
    plan: MemoryPlan,
    vocab_size: int,
    num_draft_tokens: int,
    adapters: AdapterMemory | None,
    notes: list[str],
) -> ModelDescription:
    return ModelDescription(
        name=config.model,
        architecture=type(loaded.model).__name__,
        dtype=dtype_name(model.dtype),
        kv_cache_dtype=dtype_name(kv_dtype),
        device=str(device),
        backend=backend.name,
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
        hidden_size=model.layout.hidden_size or files.config.get_text_config().hidden_size,
        eos_token_ids=files.vocabulary.eos_token_ids,
        tokenizer_json=files.vocabulary.tokenizer_json,
        turn_end_ids=files.vocabulary.turn_end_ids,
        chat_template=files.vocabulary.chat_template,
        special_tokens=files.vocabulary.special_tokens,
        default_sampling=files.default_sampling,
        is_headless=loaded.is_headless,
        default_pooling=files.pooling.pooling,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=num_draft_tokens,
        quantization=config.quantization,
        keeps_stored=bool(model.stored),
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        arena_size_bytes=0 if adapters is None else adapters.size_bytes,
        host_tier_bytes=0 if adapters is None else adapters.host_tier_bytes,
        layout=replace(model.layout, vocab_size=vocab_size),
        notes=notes,
    )


def _notes(
    config: EngineConfig,
    files: _ModelFiles,
    loaded: loader.LoadedModel,
    model: CausalModel,
    quantization: Quantization | None,
    backend: Backend,
    backend_note: str,
    plan: MemoryPlan,
    adapters: AdapterMemory | None,
) -> list[str]:
    return [
        *([HEADLESS_NOTE] if loaded.is_headless else []),
        *files.pooling.notes,
        *([backend_note] if backend_note else []),
        *checkpoint_notes(config, files.config, model),
        *quantization_notes(quantization, model, backend),
        *plan.notes,
        *model.notes,
        *_host_tier_notes(0 if adapters is None else adapters.host_tier_bytes),
    ]


def _num_threads(model: CausalModel) -> int:
    """One per available CPU, but only one for a model that fits in a core's cache.

    Measured with 2.5 M parameters on 2 cores: a step takes 1.05 ms with one thread and 1.07 to 1.18 ms with two. When
    others used both cores, threads that waited for each other made steps a hundred times longer.
    """
    return 1 if model.weight_bytes <= SINGLE_THREAD_WEIGHT_BYTES else available_cpus()


def _backend(config: EngineConfig, device: torch.device) -> tuple[Backend, str]:
    cache_dir = None if config.kernel_cache_dir is None else Path(config.kernel_cache_dir)
    try:
        return choose_backend(device, config.backend, cache_dir)
    except (CompilerUnavailable, ValueError) as error:
        hint = "" if device.type == "cpu" else "; or choose --device cpu"
        raise EngineStartError(f"--backend {config.backend} cannot run: {error}{hint}") from error


def _device(config: EngineConfig) -> torch.device:
    try:
        return choose_device(config.device, torch.cuda.device_count())
    except ValueError as error:
        raise EngineStartError(str(error)) from error


def _load_weights(
    config: EngineConfig,
    model_config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    stored: StoredWeights,
) -> loader.LoadedModel:
    progress("loading weights", 0, 1)
    if config.load_format == "dummy":
        loaded = loader.LoadedModel(loader.dummy_model(model_config, dtype, config.seed, device), is_headless=False)
    elif config.load_format in ("auto", "safetensors"):
        check_memory(config.model, model_config, dtype, stored, available_memory_bytes())
        loaded = loader.load_model(config.model, config.revision, model_config, dtype, device, stored=stored)
    else:
        raise EngineStartError(
            f"load_format {config.load_format!r} is not supported: choose auto, safetensors or dummy"
        )
    progress("loading weights", 1, 1)
    return loaded


def _plan(
    config: EngineConfig,
    model: CausalModel,
    kv_dtype: torch.dtype,
    model_config: PreTrainedConfig,
    available_bytes: int,
) -> MemoryPlan:
    shares = host_shares(config.quantization) if model.device.type == "cpu" else GPU_SHARES
    return plan_memory(
        available_bytes=available_bytes,
        block_bytes=sum(spec.elements_per_token for spec in model.kv_specs) * kv_dtype.itemsize * config.block_size,
        block_size=config.block_size,
        model_max_len=getattr(model_config.get_text_config(), "max_position_embeddings", DEFAULT_MODEL_MAX_LEN),
        requested_max_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        state_bytes=sum(spec.num_bytes for spec in model.state_specs),
        saves_states=config.enable_prefix_caching,
        kv_cache_bytes=config.kv_cache_memory_bytes,
        adapter_bytes=config.adapter_memory_bytes,
        enable_lora=config.enable_lora,
        shares=shares,
    )


def _activation_bytes(
    config: EngineConfig, model: CausalModel, kv_dtype: torch.dtype, accelerator: Accelerator, progress: Progress
) -> int:
    no_adapters = _adapter_memory(model, ALIGNMENT_BYTES).table if config.enable_lora else None
    return activation_bytes(
        accelerator,
        model,
        no_adapters,
        config,
        kv_dtype,
        lambda done, total: progress("compiling kernels", done, total),
    )


def _builder(
    config: EngineConfig,
    plan: MemoryPlan,
    model: CausalModel,
    backend: Backend,
    accelerator: Accelerator | None,
    runner: ModelRunner,
    own_tables: Collection[int],
    progress: Progress,
) -> BatchBuilder:
    """Also captures the runner's graphs, which read the builder's tensors. own_tables: as for `BatchBuilder`."""
    max_num_rows, max_num_seqs, block_size = config.max_num_batched_tokens, config.max_num_seqs, config.block_size
    max_blocks = -(-plan.max_model_len // block_size)
    if accelerator is None:
        return BatchBuilder(
            max_num_rows,
            max_num_seqs,
            max_blocks,
            block_size,
            own_tables=own_tables,
            has_states=bool(model.state_specs),
        )
    lists, sizes = None, NO_GRAPHS
    if backend.name == "triton":  # the only one that reads lists and never waits for the GPU within a step
        num_splits = splits_for_device(accelerator.device, model.kv_specs[0].num_kv_heads)
        lists = WorkLists(max_num_rows, max_num_seqs, plan.max_model_len, num_splits)
        sizes = NO_GRAPHS if config.enforce_eager else GraphSizes.up_to(max_num_rows, max_num_seqs)
    limits = max_num_rows, max_num_seqs, max_blocks, block_size
    builder = GpuBatchBuilder(*limits, accelerator, lists, sizes, own_tables)
    if sizes is not NO_GRAPHS:
        graphs = StepGraphs(accelerator, sizes)
        try:
            runner.capture(
                graphs, builder.graph_batch, lambda done, total: progress("capturing CUDA graphs", done, total)
            )
        except CaptureError as error:
            raise EngineStartError(
                f"steps of {config.model} cannot be captured in CUDA graphs ({error}): start with --enforce-eager"
            ) from error
    return builder


def _adapter_memory(
    model: CausalModel, size_bytes: int, accelerator: Accelerator | None = None, host_tier_bytes: int = 0
) -> AdapterMemory:
    members = [module for group in model.layout.groups for module in group]
    return AdapterMemory(
        num_groups=len(model.lora_groups),
        num_members=len(members),
        layout_fingerprint=model.layout.fingerprint,
        size_bytes=size_bytes,
        dtype=model.dtype,
        device=model.device,
        accelerator=accelerator,
        host_tier_bytes=host_tier_bytes,
        finish=model.finish_adapter,
        absorbed_members=[index for index, module in enumerate(members) if module.is_absorbed],
    )


def _num_speculative_tokens(
    config: EngineConfig,
    model_config: PreTrainedConfig,
    backend: Backend,
    dtype: torch.dtype,
    quantization: Quantization | None,
    *,
    is_recurrent: bool,
) -> int:
    """0 for mixture-of-experts models, too: each row may read different experts. And for recurrent layers: a rejected
    draft would stay in their states."""
    requested = config.num_speculative_tokens
    if requested == 0:
        return 0
    has_free_rows = backend.num_free_rows(dtype, quantization) > 1 and loader.is_mostly_linears(model_config)
    if has_free_rows and not is_recurrent:
        return requested or DEFAULT_NUM_SPECULATIVE_TOKENS
    if requested:
        raise EngineStartError(
            f"--num-speculative-tokens is {requested}, but speculative decoding is not available for this model in "
            f"{dtype_name(dtype)} with the {backend.name} backend: omit the flag"
        )
    return 0


def _free_rows(
    model: CausalModel, backend: Backend, model_config: PreTrainedConfig, quantization: Quantization | None
) -> FreeRows:
    """A row's attention multiplies its queries by its context's keys and values; a linear multiplies by each weight
    once.

    With a few rows, attention takes about twice as long per product: with AVX-512 and 100 M parameters, one more row
    takes 0.3 ms longer with 1,500 tokens of context than with 128, while a row's linears take 0.44 ms.
    """
    num_heads = model_config.get_text_config().num_attention_heads
    num_products = sum(2 * num_heads * spec.head_dim for spec in model.kv_specs)
    num_free_rows = backend.num_free_rows(model.dtype, quantization)
    return FreeRows(num_free_rows, model.num_weights / num_products / 2)


def _host_tier_notes(host_tier_bytes: int) -> list[str]:
    if host_tier_bytes == 0:
        return []
    locked = locked_bytes(host_tier_bytes)
    return [f"{locked} bytes of host memory are page-locked for adapters (--adapter-host-memory-bytes)"]


def _default_sampling(generation_config: GenerationConfig | None) -> dict[str, float | int]:
    """Only what the file states: transformers fills in its own defaults, which are not the model's."""
    if generation_config is None:
        return {}
    stated = generation_config.to_diff_dict()
    return {name: stated[name] for name in SAMPLING_DEFAULTS if stated.get(name) is not None}
