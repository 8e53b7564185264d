"""The settings of `loraserve serve`, from flags, environment and config file together."""

import os
from dataclasses import dataclass
from pathlib import Path

import rich_click as click

from loraserve.cli.serve.option_types import AdapterChatTemplate, LoraModule
from loraserve.cli.serve.trace_settings import TraceDestination, trace_destination
from loraserve.control.tenancy.api_keys import try_parse_id
from loraserve.engine.config import EngineConfig
from loraserve.serving.settings import RequestLimits, ServingSettings, SettingValue
from loraserve.serving.text.reasoning import REASONING_ALIASES, ReasoningFormat
from loraserve.serving.tool_calls.formats import CALL_ALIASES, ToolCallFormat

DEMO = Path(__file__).parents[2] / "demo"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""As in a Host header. Checking it keeps web pages of other sites away from an open server."""
DEMO_NAME = "loraserve-demo"
ADAPTER_DIR_SCAN_S = 10.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One field per option of `loraserve serve`, by the option's name."""

    model: str | None
    """None = the bundled demo model with its adapters."""
    tokenizer: str | None
    revision: str | None
    served_model_name: tuple[str, ...]
    chat_template: Path | None
    adapter_chat_templates: tuple[AdapterChatTemplate, ...]
    tool_call_parser: str | None
    enable_auto_tool_choice: bool
    reasoning_parser: str | None
    generation_config: str
    load_format: str
    dtype: str
    quantization: str
    device: str
    backend: str
    gpu_memory_utilization: float
    enforce_eager: bool
    num_speculative_tokens: int | None
    num_threads: int | None
    seed: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: str
    block_size: int
    enable_prefix_caching: bool
    check_invariants: bool
    enable_lora: bool | None
    lora_modules: tuple[LoraModule, ...]
    adapter_dir: Path | None
    adapter_dir_scan_s: float | None
    adapter_memory_bytes: int | None
    adapter_host_memory_bytes: int | None
    max_loras: int | None
    max_lora_rank: int | None
    allow_runtime_lora_updating: bool | None
    adapter_roots: tuple[Path, ...]
    keep_versions: int | None
    certificates: bool
    host: str | None
    port: int
    uds: Path | None
    api_key: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    metrics_port: int | None
    metrics_host: str | None
    vllm_metrics: bool
    otlp_traces_endpoint: str | None
    data_dir: Path | None
    redis_url: str | None
    redis_prefix: str
    redis_grace_s: float
    max_queued: int
    max_queued_per_tenant: int | None
    shutdown_timeout: float
    config: tuple[SettingValue, ...] = ()
    """All settings as text."""

    @property
    def is_demo(self) -> bool:
        return self.model is None

    @property
    def bind_host(self) -> str:
        """--host or its default: all addresses if --api-key is a password, as in vLLM; otherwise only this machine.

        A key made by `loraserve keys` is not a password: `LORASERVE_API_KEY` is also the key that commands send.
        """
        has_password = any(try_parse_id(key) is None for key in self.api_key)
        return self.host or ("0.0.0.0" if has_password else "127.0.0.1")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The base model's names in requests; the first is the main one."""
        return self.served_model_name or (DEMO_NAME if self.model is None else self.model,)

    @property
    def data_path(self) -> Path:
        """Everything that the server stores is below it. The demo has its own: its adapters fit no other model."""
        if self.data_dir:
            return self.data_dir.expanduser()
        return default_data_dir() / "demo" if self.is_demo else default_data_dir()

    @property
    def named_adapters(self) -> list[LoraModule]:
        """Adapters without which the server does not start: those of --lora-modules, then the demo's."""
        if self.enable_lora is False:
            return []
        return [*self.lora_modules, *(adapter_folders(DEMO / "adapters") if self.is_demo else [])]

    @property
    def found_adapters(self) -> list[LoraModule]:
        """Adapters in --adapter-dir. Those that are refused do not prevent the start."""
        return [] if self.adapter_dir is None else adapter_folders(self.adapter_dir)

    @property
    def scan_interval_s(self) -> float:
        """Time between scans of --adapter-dir while the server runs; 0 = no scans."""
        return ADAPTER_DIR_SCAN_S if self.adapter_dir_scan_s is None else self.adapter_dir_scan_s

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or _is_loopback(self.bind_host)

    @property
    def is_open_on_loopback(self) -> bool:
        """No --api-key, and only this machine can reach the server."""
        return not self.api_key and self.is_on_loopback

    @property
    def metrics_bind_host(self) -> str:
        """It needs no key, so only this machine can reach it unless --metrics-host is given."""
        return self.metrics_host or "127.0.0.1"

    @property
    def metrics_hosts(self) -> list[str] | None:
        """Host headers to accept at --metrics-port; None = any."""
        return [*LOOPBACK_HOSTS, *self.allowed_hosts] if _is_loopback(self.metrics_bind_host) else None

    @property
    def trace_destination(self) -> TraceDestination | None:
        """None = no traces. OpenTelemetry's standard variables count too."""
        return trace_destination(self.otlp_traces_endpoint, os.environ)

    @property
    def _checks_hosts(self) -> bool:
        return self.is_open_on_loopback or bool(self.allowed_hosts and not self.api_key)

    @property
    def serving(self) -> ServingSettings:
        allow_runtime_lora = self.allow_runtime_lora_updating
        return ServingSettings(
            served_model_names=list(self.model_names),
            model=self.model,
            data_dir=self.data_path,
            allowed_hosts=[*LOOPBACK_HOSTS, *self.allowed_hosts] if self._checks_hosts else None,
            allowed_origins=list(self.allowed_origins),
            allow_runtime_lora=allow_runtime_lora is not False,
            adapter_roots=[root.resolve() for root in self.adapter_roots],
            has_free_paths=self.is_open_on_loopback,
            limits=RequestLimits(max_queued=self.max_queued),
            adapter_chat_templates=[chosen.template for chosen in self.adapter_chat_templates],
            tool_call_parser=self._tool_call_parser,
            reasoning_parser=self._reasoning_parser,
            compat_metrics=self.vllm_metrics,
            config=list(self.config),
        )

    @property
    def _tool_call_parser(self) -> ToolCallFormat | None:
        name = self.tool_call_parser
        return None if name is None else CALL_ALIASES.get(name) or ToolCallFormat(name)

    @property
    def _reasoning_parser(self) -> ReasoningFormat | None:
        """gpt-oss's tool calls are found by the same parser as its reasoning, so one option implies the other."""
        name = self.reasoning_parser
        if name is None and self.tool_call_parser == ToolCallFormat.OPENAI:
            return ReasoningFormat.OPENAI_GPTOSS
        return None if name is None else REASONING_ALIASES.get(name) or ReasoningFormat(name)

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            model=str(DEMO / "model") if self.model is None else self.model,
            tokenizer=self.tokenizer,
            revision=self.revision,
            turn_end_tokens=tuple(
                dict.fromkeys(token for chosen in self.adapter_chat_templates for token in chosen.template.stop_tokens)
            ),
            generation_config=self.generation_config,
            load_format=self.load_format,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            backend=self.backend,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            kv_cache_dtype=self.kv_cache_dtype,
            adapter_memory_bytes=self.adapter_memory_bytes,
            adapter_host_memory_bytes=self.adapter_host_memory_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=self.enforce_eager,
            max_loras=self.max_loras,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_lora=self.enable_lora is not False,
            num_speculative_tokens=self.num_speculative_tokens,
            num_threads=self.num_threads,
            seed=self.seed,
            kernel_cache_dir=str(self.data_path / "kernels"),
            check_invariants=self.check_invariants,
        )


def _is_loopback(host: str) -> bool:
    return host in ("::1", *LOOPBACK_HOSTS)


def default_data_dir() -> Path:
    """Raises `click.UsageError` for a user without a home directory."""
    data_home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    try:
        return Path(data_home).expanduser() / "loraserve"
    except RuntimeError as error:
        raise click.UsageError("this user has no home directory: give --data-dir, or set HOME") from error


def adapter_folders(directory: Path) -> list[LoraModule]:
    """Every subfolder with an adapter_config.json, under the folder's name."""
    return [LoraModule(config.parent.name, config.parent) for config in sorted(directory.glob("*/adapter_config.json"))]
