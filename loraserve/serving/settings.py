"""Start-up settings that the API needs."""

from enum import StrEnum
from pathlib import Path

import msgspec

from loraserve.serving.text.named_template import NamedChatTemplate
from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one request, and on all requests together (`max_queued`)."""

    max_header_bytes: int = 32 * 1024
    """URL and headers together."""
    max_body_bytes: int = 2_000_000
    max_json_depth: int = 32
    max_n: int = 8
    max_prompts: int = 64
    max_inputs: int = 2048
    """Inputs of a request for embeddings (the same as OpenAI's limit), labels or scores."""
    max_pooled_values: int = 4_194_304
    """Values in all vectors of such a request together: one takes up to 25 bytes in the response."""
    max_pair_bytes: int = 4_194_304
    """All documents of a request together, each with its query and the text that its reranker adds."""
    max_stop_strings: int = 16
    """OpenAI takes 4, vLLM any number; tasks of evaluation harnesses have more than 4."""
    max_stop_chars: int = 256
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 300
    max_top_logprobs: int = 20
    max_prompt_logprobs: int = 2_000_000
    """Over all tokens of all prompts, counted once per choice that echoes them. One takes about 100 bytes of memory."""
    max_messages: int = 4096
    """Also limits the tool calls in all messages together."""
    max_schema_chars: int = 65_536
    """Length of a JSON schema that constrains an answer, or of a choice of texts."""
    max_grammar_chars: int = 8_192
    """Length of a regular expression or grammar, whose characters may cost more, and of one text in a schema."""
    max_multiple_of: int = 10_000
    """Remainders of all `multipleOf` of a schema together."""
    max_tools: int = 128
    max_tools_bytes: int = 256 * 1024
    max_template_kwargs: int = 32
    max_template_kwargs_bytes: int = 16 * 1024
    max_queued: int = 256
    """Sequences beyond those that the engine can run at once; requests beyond that get 429."""


class SettingSource(StrEnum):
    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"
    DERIVED = "derived"
    """Derived from other settings."""


class SettingValue(msgspec.Struct, frozen=True, kw_only=True):
    """One effective setting, for display."""

    name: str
    """Name of the flag, without leading dashes."""
    value: str
    """Never a secret; "" = not set."""
    source: SettingSource
    help: str


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    served_model_names: list[str]
    """Names of the base model; the first one is shown as the parent of adapters."""
    model: str | None = None
    """The base model's folder or Hugging Face name; None = the bundled demo."""
    data_dir: Path
    """All files that we write are below it."""
    allowed_hosts: list[str] | None = None
    """Host names that requests may carry, without port, e.g. ["localhost", "127.0.0.1", "[::1]"]; None = any."""
    allowed_origins: list[str] = []
    """Origins of web pages that may call the API, besides the server's own."""
    allow_runtime_lora: bool = True
    """Whether /v1/load_lora_adapter may load from a path on this machine at all."""
    adapter_roots: list[Path] = []
    """Folders that must contain such a path, given with their symbolic links resolved."""
    has_free_paths: bool = False
    """Whether `adapter_roots` is ignored while no key is required: any client could read our files anyway."""
    adapter_chat_templates: list[NamedChatTemplate] = []
    tool_call_parser: ToolCallFormat | None = None
    """How the base model, and thus its adapters, write tool calls; None = `tool_choice` "auto" is refused."""
    reasoning_parser: ReasoningFormat | None = None
    """How they mark their reasoning before the answer; None = it is part of the answer."""
    compat_metrics: bool = True
    """Whether /metrics also has the vllm: names."""
    first_output_wait_s: float = 5.0
    """A stream's headers wait this long for its first output, so that an early failure keeps its HTTP status."""
    ping_interval_s: float = 15.0
    """A stream on which nothing was sent for this long gets an SSE comment."""
    progress_timeout_s: float = 5.0
    """With pending work, the engine counts as ready only after progress this recently. Long steps extend the time."""
    limits: RequestLimits = RequestLimits()
    config: list[SettingValue] = []
    """All settings, for display to admins."""

    @property
    def base_names(self) -> list[str]:
        """All names that clients may use for the base model when they say which one an adapter is for."""
        names = [*self.served_model_names, self.model]
        return [name for name in dict.fromkeys(names) if name is not None]
