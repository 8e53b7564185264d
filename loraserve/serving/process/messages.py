"""Messages between the API process and the engine process: msgpack frames over an inherited socket pair."""

import msgspec

from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import BegunPrompt, EngineRequest, EngineStats, SequenceOutput


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Idempotent; ignored if the request is unknown or finished. Always ordered after the add of the same request."""

    request_id: str
    index: int | None = None
    """One choice; None = all of them."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Make `digest` usable. The engine maps the packed file; it copies it into the arena at first use."""

    digest: str
    packed_path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget `digest`. Acknowledged once no running sequence uses it; new requests for it fail at once."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop now; running requests finish with reason "abort"."""


ToEngine = AddRequest | Abort | LoadAdapter | UnloadAdapter | Shutdown


class Ready(msgspec.Struct, frozen=True, tag=True):
    model: ModelDescription


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; `message` tells the operator what to change."""

    message: str


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """A phase of starting, for the progress display."""

    phase: str
    done: int
    total: int


class PromptsBegun(msgspec.Struct, frozen=True, tag=True):
    """Sent when the prompts' first step begins, so that a request that ends in it does not count as only waiting."""

    prompts: list[BegunPrompt]


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Everything that one engine step produced, and from time to time the engine's statistics."""

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
    Ready
    | StartFailed
    | StartProgress
    | PromptsBegun
    | StepOutputs
    | AdapterLoaded
    | AdapterUnloaded
    | AdapterFailed
    | EngineFailed
)
