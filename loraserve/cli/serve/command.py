"""`loraserve serve`: the options. `server.py` runs the server."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich_click as click
from click.core import ParameterSource
from loraserve_adapters.base_names import is_base_name
from loraserve_kernels.quantization import ROUNDINGS

from loraserve.cli.number_range import NumberRange
from loraserve.cli.serve.config_file import load_config_file
from loraserve.cli.serve.option_types import (
    HOST_NAME,
    ORIGIN,
    REDIS_PREFIX,
    ChatTemplateType,
    CollectorUrlType,
    DeviceType,
    HumanInt,
    LoraModuleType,
    RedisUrlType,
)
from loraserve.cli.serve.setting_values import with_setting_values
from loraserve.cli.serve.settings import ServeSettings
from loraserve.cli.serve.vllm_flags import drop_noop_flags, refusal
from loraserve.engine.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from loraserve.live.key_names import DEFAULT_PREFIX
from loraserve.serving.text.reasoning import REASONING_ALIASES, ReasoningFormat
from loraserve.serving.tool_calls.formats import CALL_ALIASES, ToolCallFormat

MODEL_ALIASES = ("--model-id", "--model-path")

_defaults = EngineConfig(model="")


class _ServeCommand(click.RichCommand):
    """Accepts command lines written for vLLM; refuses flags that we do not have with a reason."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = drop_noop_flags(args)
        for token in args:
            if message := refusal(token):
                raise click.UsageError(message, ctx)
        return super().parse_args(ctx, spread_values([_main_name(token) for token in args]))


def _main_name(token: str) -> str:
    flag, separator, value = token.partition("=")
    return f"--model{separator}{value}" if flag.replace("_", "-") in MODEL_ALIASES else token


def spread_values(args: list[str]) -> list[str]:
    """Rewrites vLLM's `--lora-modules a=1 b=2` to `--lora-modules a=1 --lora-modules b=2`.

    A model after the adapters remains a model: it is neither name=path nor JSON.
    """
    spread: list[str] = []
    flag: str | None = None
    for token in args:
        if token.startswith("-"):
            flag = token if token.replace("_", "-") in _SEVERAL_VALUES else None
            spread.append(token)
        elif flag is None:
            spread.append(token)
        else:
            takes, repeated = _SEVERAL_VALUES[flag.replace("_", "-")], spread[-1] != flag
            spread += [flag, token] if repeated and takes(token) else [token]
    return spread


def _is_named_path(token: str) -> bool:
    return "=" in token or token.startswith("{")


_SEVERAL_VALUES: dict[str, Callable[[str], bool]] = {
    "--lora-modules": _is_named_path,
    "--adapter-chat-templates": _is_named_path,
    "--served-model-name": lambda _token: True,
    "--allowed-hosts": lambda _token: True,
    "--allowed-origins": lambda _token: True,
    "--adapter-roots": lambda _token: True,
}


MAX_INT = 2**63 - 1
"""Larger numbers cannot be sent to the engine."""


def _option(*names: str, **attributes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A click option that is also read from LORASERVE_<FLAG>."""
    flag = names[0].partition("/")[0].lstrip("-")
    attributes.setdefault("envvar", f"LORASERVE_{flag.replace('-', '_').upper()}")
    return click.option(*names, **attributes)


@click.command(
    cls=_ServeCommand,
    context_settings={
        "show_default": True,
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
@click.argument("positional_model", metavar="[MODEL]", required=False)
@_option("--model", panel="Model", help="Model directory or cached Hugging Face name; same as MODEL. [bundled demo]")
@_option("--served-model-name", panel="Model", multiple=True, help="Name(s) of the base model in requests.")
@_option("--tokenizer", panel="Model", help="Tokenizer to use instead of the model's: directory or name.")
@_option("--revision", panel="Model", help="Revision in the local Hugging Face cache.")
@_option(
    "--chat-template",
    panel="Model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Jinja file to use instead of the model's chat template.",
)
@_option(
    "--adapter-chat-templates",
    panel="Adapters",
    type=ChatTemplateType(),
    multiple=True,
    help="Jinja files that adapters can choose by name: chat_template in adapter_config.json.",
)
@_option(
    "--tool-call-parser",
    panel="Model",
    type=click.Choice([*(parser.value for parser in ToolCallFormat), *CALL_ALIASES]),
    help='Format of the model\'s tool calls. [none: tool_choice "auto" is refused]',
)
@_option("--enable-auto-tool-choice", panel="Model", is_flag=True, help="Implied by --tool-call-parser.")
@_option(
    "--reasoning-parser",
    panel="Model",
    type=click.Choice([*(parser.value for parser in ReasoningFormat), *REASONING_ALIASES]),
    help="Format of the model's reasoning; separates it into reasoning_content. [none: it stays in content]",
)
@_option(
    "--generation-config",
    panel="Model",
    type=click.Choice(["auto", "vllm"]),
    default=_defaults.generation_config,
    help="Sampling defaults: auto = from the model's generation_config.json, vllm = OpenAI's.",
)
@_option(
    "--load-format",
    panel="Model",
    type=click.Choice(["auto", "safetensors", "dummy"]),
    default="auto",
    help="auto and safetensors = read the weights; dummy = random weights, for tests.",
)
@_option(
    "--dtype",
    panel="Model",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Type of weights, adapters and, by default, the KV cache. auto = the model's, on a CPU possibly a faster one.",
)
@_option(
    "--quantization",
    "-q",
    panel="Model",
    type=click.Choice(["none", *map(str, ROUNDINGS)]),
    default=_defaults.quantization,
    help="Round the layers' weights to 8 or 4.5 bits while loading; CPU only.",
)
@_option(
    "--lora-modules", panel="Adapters", type=LoraModuleType(), multiple=True, help="Adapters to serve from the start."
)
@_option(
    "--adapter-dir",
    panel="Adapters",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Serve every subfolder that has an adapter_config.json, under the folder's name.",
)
@_option(
    "--adapter-dir-scan-s",
    panel="Adapters",
    type=NumberRange(0),
    help="Seconds between scans of --adapter-dir for new or changed folders; 0 = scan only at start. [10]",
)
@_option(
    "--adapter-memory-bytes",
    panel="Adapters",
    type=HumanInt(),
    help="Memory for adapters in use: 512M, 4G, … [15 % of what is free, at most 2G on a CPU]",
)
@_option(
    "--adapter-host-memory-bytes",
    panel="Adapters",
    type=HumanInt(may_be_zero=True),
    help="Page-locked memory for adapters evicted from a GPU; 0 = none. [a tenth of what is free, at most 4G]",
)
@_option("--max-loras", panel="Adapters", type=click.IntRange(1), help="Most distinct adapters in one step. [no limit]")
@_option(
    "--max-lora-rank", panel="Adapters", type=click.IntRange(1, 512), help="Refuse adapters of a higher rank. [512]"
)
@_option("--enable-lora/--no-enable-lora", panel="Adapters", default=None, help="Serve adapters. [on]")
@_option(
    "--allow-runtime-lora-updating/--no-allow-runtime-lora-updating",
    panel="Adapters",
    default=None,
    envvar=["LORASERVE_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"],
    help="Let admins load adapters from paths on this machine. [on]",
)
@_option(
    "--adapter-roots",
    panel="Adapters",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folders that /v1/load_lora_adapter may load from. [any on a server without keys, else none]",
)
@_option(
    "--keep-versions",
    panel="Adapters",
    type=click.IntRange(1, 500),
    help="Keep each adapter's newest N versions and those with an alias; delete others on publishing. [keep all]",
)
@_option(
    "--certificates/--no-certificates",
    panel="Adapters",
    default=True,
    help="Compare each new adapter with PEFT in the background, if memory allows.",
)
@_option("--host", panel="Server", help="Address to listen on. [127.0.0.1; with --api-key 0.0.0.0]")
@_option("--port", panel="Server", type=click.IntRange(0, 65535), default=8000, help="0 = any free port.")
@_option(
    "--uds",
    panel="Server",
    type=click.Path(path_type=Path),
    help="Listen on this Unix socket instead of host and port.",
)
@_option(
    "--api-key",
    panel="Server",
    multiple=True,
    envvar=["LORASERVE_API_KEY", "VLLM_API_KEY"],
    help="Key that clients must send, for inference; may be repeated.",
)
@_option(
    "--allowed-hosts",
    panel="Server",
    type=HOST_NAME,
    multiple=True,
    help="Further Host names to accept on a server without keys. [localhost, 127.0.0.1, [::1]]",
)
@_option(
    "--allowed-origins",
    panel="Server",
    type=ORIGIN,
    multiple=True,
    help="Origins of web pages that may call the server (CORS), such as https://example.com.",
)
@_option(
    "--metrics-port",
    panel="Server",
    type=click.IntRange(0, 65535),
    help="Also serve /metrics and /health on this port, without a key; 0 = any free port.",
)
@_option("--metrics-host", panel="Server", help="Address of --metrics-port. [127.0.0.1]")
@_option(
    "--vllm-metrics/--no-vllm-metrics", panel="Server", default=True, help="Include vLLM's metric names in /metrics."
)
@_option(
    "--otlp-traces-endpoint",
    panel="Server",
    type=CollectorUrlType(),
    help="Send a span for each request to this OTLP/HTTP collector; needs loraserve[otel]. [the OTEL_… variables]",
)
@_option(
    "--data-dir",
    panel="Server",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything is stored. [~/.local/share/loraserve; without MODEL, its subfolder demo]",
)
@_option(
    "--redis-url",
    panel="Server",
    type=RedisUrlType(),
    help="redis://…, rediss://… or unix://… [a private Valkey in --data-dir]",
)
@_option(
    "--redis-prefix",
    panel="Server",
    type=REDIS_PREFIX,
    default=DEFAULT_PREFIX,
    help="Prefix of every key in Redis.",
)
@_option(
    "--redis-grace-s",
    panel="Server",
    type=NumberRange(0),
    default=60.0,
    help="Seconds that known API keys keep working while Redis is unreachable.",
)
@_option(
    "--max-queued", panel="Server", type=click.IntRange(0), default=256, help="Most sequences that wait for the engine."
)
@_option(
    "--max-queued-per-tenant",
    panel="Server",
    type=click.IntRange(0),
    help="The same for each tenant without its own limit. [32; without keys, --max-queued]",
)
@_option(
    "--shutdown-timeout",
    panel="Server",
    type=NumberRange(0),
    default=30.0,
    help="Seconds for running requests to finish after SIGTERM.",
)
@_option(
    "--max-model-len",
    panel="Engine",
    type=HumanInt(),
    help="Most tokens of prompt and output together: 32k, 128K, … [the model's, or what the KV cache holds]",
)
@_option(
    "--max-num-seqs",
    panel="Engine",
    type=click.IntRange(1),
    default=_defaults.max_num_seqs,
    help="Most sequences that run at once.",
)
@_option(
    "--max-num-batched-tokens",
    panel="Engine",
    type=HumanInt(),
    default=_defaults.max_num_batched_tokens,
    help="Most tokens in one step; longer prompts are computed in chunks.",
)
@_option(
    "--kv-cache-memory-bytes",
    panel="Engine",
    type=HumanInt(),
    help="Memory of the KV cache: 512M, 4G, … [CPU: 40 % of what is free, at most 4G; GPU: 85 % of what is left]",
)
@_option(
    "--kv-cache-dtype",
    panel="Engine",
    type=click.Choice(["auto", "fp8"]),
    default=_defaults.kv_cache_dtype,
    help="auto = --dtype; fp8 = e4m3 without scales, on GPUs of compute capability 8.9 or newer.",
)
@_option(
    "--block-size",
    panel="Engine",
    type=click.IntRange(1),
    default=_defaults.block_size,
    help="Tokens in a block of the KV cache.",
)
@_option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    panel="Engine",
    default=_defaults.enable_prefix_caching,
    help="Reuse the KV cache of prompts that begin with the same tokens.",
)
@_option(
    "--device",
    panel="Engine",
    type=DeviceType(),
    default=_defaults.device,
    help="auto, cpu, cuda or cuda:<number>. auto = cuda if there is a GPU of compute capability 8.0 or newer.",
)
@_option(
    "--backend",
    panel="Engine",
    type=click.Choice(["auto", "cpu", "triton", "reference"]),
    default=_defaults.backend,
    help="Kernels: cpu = C, triton = GPU, reference = plain torch. auto = the fastest that works here.",
)
@_option(
    "--gpu-memory-utilization",
    panel="Engine",
    type=NumberRange(0, 1, min_open=True),
    default=_defaults.gpu_memory_utilization,
    help="Share of the GPU's free memory to use; no effect on a CPU.",
)
@_option("--enforce-eager", panel="Engine", is_flag=True, help="No CUDA graphs: faster start, slower steps; GPU only.")
@_option(
    "--num-speculative-tokens",
    panel="Engine",
    type=click.IntRange(0, MAX_SPECULATIVE_TOKENS),
    help="Most tokens to draft from the request's own text for one verification; 0 = none. [16; GPU: 0]",
)
@_option(
    "--num-threads", panel="Engine", type=click.IntRange(1), help="Threads of the engine on a CPU. [available CPUs]"
)
@_option("--seed", panel="Engine", type=int, default=_defaults.seed, help="Seed of --load-format dummy.")
@_option("--check-invariants", is_flag=True, hidden=True)
@_option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=load_config_file,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with these options.",
)
@click.pass_context
def serve(ctx: click.Context, positional_model: str | None, **options: Any) -> None:
    """Serve MODEL and its adapters over an OpenAI-compatible API.

    Without MODEL: the bundled demo model with its adapters. Every option can also be set as LORASERVE_<OPTION>.
    """
    _check_variables(ctx)
    model = options.pop("model")
    if positional_model and _is_flag(ctx, "model") and positional_model != model:
        raise click.UsageError(f"two models are given: {positional_model!r} and --model {model!r}")
    for flag, other in (("uds", "host"), ("host", "uds")):
        if _is_flag(ctx, flag) and not _is_flag(ctx, other):
            options[other] = ctx.params[other] = None
            ctx.set_parameter_source(other, ParameterSource.DEFAULT)
    settings = ServeSettings(model=positional_model or model, **options)
    _check_sizes(options)
    _check(settings)
    settings = with_setting_values(settings, ctx, positional_model)
    from loraserve.cli.serve.server import run_server

    sys.exit(run_server(settings))


def _is_flag(ctx: click.Context, option: str) -> bool:
    """Whether the value comes from a flag, which overrides variables, the config file and defaults."""
    return ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _check_variables(ctx: click.Context) -> None:
    """Refuses variables such as `LORASERVE_NO_CERTIFICATES=1`, which would have no effect."""
    for option in ctx.command.params:
        for flag in option.secondary_opts:
            variable = f"LORASERVE_{flag.lstrip('-').replace('-', '_').upper()}"
            if variable in os.environ:
                raise click.UsageError(f"there is no variable {variable}: set {option.envvar}=false instead")


def _check_sizes(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise click.UsageError(f"--{name.replace('_', '-')}: {value} is out of range; the limit is {MAX_INT}")


def _check(settings: ServeSettings) -> None:
    if settings.model is None and len(settings.served_model_name) > 1:
        # As in vLLM, `--served-model-name a b` takes all following words, and so may have taken the model.
        raise click.UsageError("several --served-model-name require a model: give MODEL before them, or --model")
    if "" in settings.api_key:
        # For example from "$UNSET": the server would listen on all addresses, and no client could use it.
        raise click.UsageError("--api-key is empty: give a key, or leave the option out")
    if settings.enable_lora is False and (settings.lora_modules or settings.adapter_dir):
        raise click.UsageError("--no-enable-lora excludes --lora-modules and --adapter-dir")
    if settings.enable_lora is False and settings.adapter_chat_templates:
        raise click.UsageError("--no-enable-lora excludes --adapter-chat-templates")
    base_names = settings.serving.base_names
    for module in settings.lora_modules:
        if module.base_model_name and not is_base_name(module.base_model_name, base_names):
            other = f"{module.name} is for the base model {module.base_model_name!r}"
            raise click.UsageError(f"--lora-modules: {other}, but this server's is {' or '.join(base_names)}")
    names = [template.name for template in settings.adapter_chat_templates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise click.UsageError(f"--adapter-chat-templates: two templates are named {twice!r}")
    if settings.enable_lora is False and settings.adapter_host_memory_bytes is not None:
        raise click.UsageError("--no-enable-lora excludes --adapter-host-memory-bytes")
    if settings.enable_auto_tool_choice and settings.tool_call_parser is None:
        raise click.UsageError("--enable-auto-tool-choice needs --tool-call-parser")
    parsers = settings.serving.tool_call_parser, settings.serving.reasoning_parser
    if parsers[0] is ToolCallFormat.OPENAI and parsers[1] is not ReasoningFormat.OPENAI_GPTOSS:
        raise click.UsageError(f"--tool-call-parser openai excludes --reasoning-parser {parsers[1]}")
    if settings.uds and settings.host:
        raise click.UsageError("--uds excludes --host")
    if settings.adapter_dir_scan_s is not None and settings.adapter_dir is None:
        raise click.UsageError("--adapter-dir-scan-s needs --adapter-dir")
    if settings.metrics_host and settings.metrics_port is None:
        raise click.UsageError("--metrics-host needs --metrics-port")
