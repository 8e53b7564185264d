"""What the API needs to know of how it was started."""

from pathlib import Path

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, and all of them together, may ask for."""

    max_header_bytes: int = 32 * 1024
    """URL and headers together."""
    max_body_bytes: int = 2_000_000
    max_json_depth: int = 32
    max_n: int = 8
    max_prompts: int = 64
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 300
    max_top_logprobs: int = 20
    max_messages: int = 4096
    max_queued: int = 256
    """Sequences beyond those the engine can run at once; more are answered 429."""


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    served_model_names: list[str]
    """Names of the base model; the first one is shown as the parent of adapters."""
    data_dir: Path
    """Everything we write is below it."""
    api_keys: list[str] = []
    """Empty = open: no key is asked for, and an Authorization header is ignored."""
    allowed_hosts: list[str] | None = None
    """Host names that requests may carry, without port, e.g. ["localhost", "127.0.0.1", "[::1]"]; None = any."""
    allowed_origins: list[str] = []
    """Origins allowed besides the server's own; read only where `allowed_hosts` is set."""
    allow_runtime_lora: bool = False
    """Whether /v1/load_lora_adapter may load from a path on this machine."""
    compat_metrics: bool = True
    """Whether /metrics also has the vllm: names."""
    drain_timeout_s: float = 30.0
    """How long whoever stops the server lets running requests finish."""
    unload_timeout_s: float = 30.0
    """How long an unload call waits for running sequences; the adapter is invisible from its start."""
    first_output_wait_s: float = 5.0
    """A stream's headers wait this long for its first output, so that an early failure keeps its HTTP status."""
    ping_interval_s: float = 15.0
    """A stream on which nothing was sent for this long gets an SSE comment."""
    progress_timeout_s: float = 5.0
    """With work at hand, the engine is ready only if it made progress this recently."""
    limits: Limits = Limits()

    @property
    def packed_dir(self) -> Path:
        """Where packed adapters are cached."""
        return self.data_dir / "packed"
