"""All options that the engine process starts with. No torch here: the command line imports this module."""

from dataclasses import dataclass

MAX_RESIDENT_ADAPTERS = 1024
"""Most adapters in the arena at once, however small they are."""
MAX_SPECULATIVE_TOKENS = 64
"""Most tokens in one draft. With AMX, where rows are cheapest, a step with drafts has at most 32 rows."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """None or "auto" = chosen from the model and the machine when the engine starts, and reported."""

    model: str
    """Directory with config.json and *.safetensors, or a name in the local Hugging Face cache."""
    tokenizer: str | None = None
    revision: str | None = None
    turn_end_tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer that end a turn in a chat template that adapters may choose. Like EOS, they also
    end an output that a grammar constrains."""
    generation_config: str = "auto"
    """Sampling defaults: "auto" = the model's generation_config, "vllm" = none of it, as with vLLM's flag."""
    load_format: str = "auto"
    """"auto" = "safetensors"; "dummy" = random weights of the config's shapes."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16" or "float16"."""
    quantization: str = "none"
    """Of the layers' weights, on a CPU: "none" or a `Quantization`."""
    device: str = "auto"
    """"auto" = the first GPU if the kernels run on it, else the CPU; "cpu", "cuda" or "cuda:<number>"."""
    backend: str = "auto"
    """"auto" = chosen by the device; "cpu" (C), "triton" (GPUs) or "reference" (plain torch)."""
    max_model_len: int | None = None
    max_num_seqs: int = 128
    """Sequences running at once."""
    max_num_batched_tokens: int = 1024
    """Token budget of one step."""
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    """"auto" = the model's; "fp8" (e4m3, without scales) on GPUs of compute capability 8.9 and newer."""
    kv_cache_memory_bytes: int | None = None
    adapter_memory_bytes: int | None = None
    adapter_host_memory_bytes: int | None = None
    """Page-locked host memory for adapters, in addition to those in GPU memory; 0 = none. Not for a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's free memory that the engine may use. Has no effect on a CPU, nor has `enforce_eager`."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    max_loras: int | None = None
    """Distinct adapters in one step; None = as many as fit."""
    enable_prefix_caching: bool = True
    enable_lora: bool = True
    num_speculative_tokens: int | None = None
    """Longest draft of a sequence's next tokens; 0 = no drafts, None = 16 if the backend has free rows."""
    num_threads: int | None = None
    seed: int = 0
    """For dummy weights."""
    kernel_cache_dir: str | None = None
    """Directory for the compiled C kernels; None = the user's cache directory."""
    check_invariants: bool = False
    """Check KV block and adapter conservation after every step, and fail loudly."""
