"""Messages between the API process and the engine process: msgpack frames over an inherited socket pair."""

import msgspec
from loraserve_adapters.base_layout import BaseLayout

from loraserve.engine.request import EngineRequest, EngineStats, SequenceOutput


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True):
    request_id: str
    index: int | None = None
    """One choice; None = all of them."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Idempotent; what is unknown or finished is ignored. Always ordered after the add of the same request."""

    aborts: list[Abort]


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Make `digest` usable. The engine maps the packed file; it copies it into the arena at first use."""

    digest: str
    packed_path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget `digest`. Acknowledged once no running sequence uses it; new requests for it fail at once."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop now; whatever runs is finished with reason "abort"."""


ToEngine = AddRequests | AbortRequests | LoadAdapter | UnloadAdapter | Shutdown


class ModelInfo(msgspec.Struct, frozen=True):
    """What the API process needs to know of the model; it loads neither torch nor transformers itself."""

    name: str
    """Model path or name as given."""
    architecture: str
    dtype: str
    kv_cache_dtype: str
    device: str
    backend: str
    max_model_len: int
    vocab_size: int
    """Token ids at or above this are refused; the logits beyond it are masked."""
    eos_token_ids: list[int]
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, pad_token, unk_token: for the chat template."""
    default_sampling: dict[str, float | int]
    """From generation_config: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens where given."""
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    arena_size_bytes: int
    host_tier_bytes: int
    layout: BaseLayout
    notes: list[str] = []
    """What was chosen or lowered at start-up, for the person who started the server."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    model: ModelInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; `message` tells the person what to change."""

    message: str


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """A phase of starting, for the progress display."""

    phase: str
    done: int
    total: int


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one engine step produced, and now and then how the engine is doing."""

    outputs: list[SequenceOutput]
    stats: EngineStats | None = None


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    digest: str


class AdapterUnloaded(msgspec.Struct, frozen=True, tag=True):
    digest: str


class AdapterFailed(msgspec.Struct, frozen=True, tag=True):
    digest: str
    message: str


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """A step failed; the engine process ends with exit code 1 after this message."""

    message: str


FromEngine = (
    Ready | StartFailed | StartProgress | StepOutputs | AdapterLoaded | AdapterUnloaded | AdapterFailed | EngineFailed
)
