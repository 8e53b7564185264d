"""What the API needs to know of how it was started."""

from enum import StrEnum
from pathlib import Path

import msgspec

from loraserve.serving.text.named_template import NamedChatTemplate
from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, and all of them together, may ask for."""

    max_header_bytes: int = 32 * 1024
    """URL and headers together."""
    max_body_bytes: int = 2_000_000
    max_json_depth: int = 32
    max_n: int = 8
    max_prompts: int = 64
    max_inputs: int = 2048
    """Of a request for embeddings, as OpenAI has it, for labels or for scores."""
    max_pooled_values: int = 4_194_304
    """Of all its vectors together: one takes up to 25 bytes in the answer."""
    max_pair_bytes: int = 4_194_304
    """Of a request's documents together, each with its query and what its reranker puts around them."""
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 300
    max_top_logprobs: int = 20
    max_prompt_logprobs: int = 2_000_000
    """Of all tokens of all prompts, again for each choice that echoes them. One takes some 100 bytes of memory."""
    max_messages: int = 4096
    """Also of all tool calls in them."""
    max_schema_chars: int = 65_536
    """Of a JSON schema that an answer is held to, and of a choice of texts."""
    max_grammar_chars: int = 8_192
    """Of a regular expression or a grammar, whose characters may cost more, and of one text in a schema."""
    max_multiple_of: int = 10_000
    """Of a schema's `multipleOf` together."""
    max_tools: int = 128
    max_tools_bytes: int = 256 * 1024
    max_template_kwargs: int = 32
    max_template_kwargs_bytes: int = 16 * 1024
    max_queued: int = 256
    """Sequences beyond those the engine can run at once; more are answered 429."""


class SettingSource(StrEnum):
    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"
    DERIVED = "derived"
    """It follows from other settings."""


class SettingValue(msgspec.Struct, frozen=True, kw_only=True):
    """One setting in force, for people."""

    name: str
    """As the flag without dashes."""
    value: str
    """Never a secret; "" = not set."""
    source: SettingSource
    help: str


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    served_model_names: list[str]
    """Names of the base model; the first one is shown as the parent of adapters."""
    model: str | None = None
    """Where it is: a folder or a Hugging Face name; None = the bundled demo."""
    data_dir: Path
    """Everything we write is below it."""
    allowed_hosts: list[str] | None = None
    """Host names that requests may carry, without port, e.g. ["localhost", "127.0.0.1", "[::1]"]; None = any."""
    allowed_origins: list[str] = []
    """Of web pages that may call, besides the server's own."""
    allow_runtime_lora: bool = True
    """Whether /v1/load_lora_adapter may load from a path on this machine at all."""
    adapter_roots: list[Path] = []
    """Folders that such a path must be in; without links."""
    has_free_paths: bool = False
    """Whether that is left aside while no key is asked for: whoever can connect could as well read our files."""
    adapter_chat_templates: list[NamedChatTemplate] = []
    tool_call_parser: ToolCallFormat | None = None
    """How the base model, and so its adapters, write tool calls; None = `tool_choice` "auto" is refused."""
    reasoning_parser: ReasoningFormat | None = None
    """How they mark what they think before they answer; None = it is part of the answer."""
    compat_metrics: bool = True
    """Whether /metrics also has the vllm: names."""
    first_output_wait_s: float = 5.0
    """A stream's headers wait this long for its first output, so that an early failure keeps its HTTP status."""
    ping_interval_s: float = 15.0
    """A stream on which nothing was sent for this long gets an SSE comment."""
    progress_timeout_s: float = 5.0
    """With work at hand, the engine is ready only if it made progress this recently; steps that take longer count."""
    limits: Limits = Limits()
    config: list[SettingValue] = []
    """All settings, to be shown to admins."""

    @property
    def base_names(self) -> list[str]:
        """All that the base model may be called by someone who says which one an adapter is for."""
        names = [*self.served_model_names, self.model]
        return [name for name in dict.fromkeys(names) if name is not None]
