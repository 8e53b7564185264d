"""The interface between the API and an engine, wherever the engine runs."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import BegunPrompt, EngineRequest, EngineStats, SequenceOutput


class EngineDeadError(Exception):
    """The engine process is gone; the message says why."""


class AdapterLoadError(Exception):
    """The engine refused the packed adapter; the message says why."""


OnBegun = Callable[[BegunPrompt], None]


def ignore_begun(_prompt: BegunPrompt) -> None:
    """For callers that need not know when a prompt begins."""


class EngineClient(Protocol):
    """One engine. All methods are called on the event loop."""

    @property
    def model(self) -> ModelDescription: ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""
        ...

    @property
    def last_progress_s(self) -> float:
        """`time.monotonic()` of the last sign that the engine makes progress (a step, or an idle heartbeat)."""
        ...

    @property
    def longest_step_s(self) -> float:
        """The longest step so far; another step of that length is not a stall."""
        ...

    @property
    def error(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        ...

    def generate(
        self, request: EngineRequest, on_begun: OnBegun = ignore_begun
    ) -> AsyncGenerator[list[SequenceOutput]]:
        """Yield the request's new outputs, in order; several steps may be joined if the consumer lags.

        on_begun: called once, before any output, when the engine begins to compute the prompt.
        Ends after the last choice's finish_reason. Closing the iterator early aborts the request without awaiting.
        Raises `EngineDeadError`.
        """
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop the request, or one choice of it; a no-op if it is unknown or finished."""
        ...

    async def load(self, digest: str, packed_path: str) -> None:
        """Make an adapter usable. Raises `AdapterLoadError`."""
        ...

    async def unload(self, digest: str) -> None:
        """Returns once no sequence uses the adapter and the engine has forgotten it.

        NOTE: do not load it again before this returns: a load cancels the unload, which is then never answered.
        """
        ...
