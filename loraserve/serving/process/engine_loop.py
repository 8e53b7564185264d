"""The engine process's loop: receive messages from the API process, run one step, answer with one message."""

import time
from collections.abc import Callable
from typing import Protocol

from loraserve_adapters.errors import AdapterError

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import BegunPrompt, EngineRequest, EngineStats, FinishReason, SequenceOutput
from loraserve.serving.process.messages import (
    Abort,
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    AddRequest,
    FromEngine,
    LoadAdapter,
    PromptsBegun,
    Shutdown,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)

STATS_INTERVAL_S = 0.1
"""A busy engine reports its statistics this often: they list every resident adapter, which is too much per step.

It also reports them each time that it runs out of work, but in between without that list: 0.2 ms for 1,024 adapters.
"""
MAX_STATS_SHARE = 0.05
"""Maximum share of a busy engine's time for statistics. They take about 30 ms if 5,000 requests for 2,000 adapters
wait."""
IDLE_HEARTBEAT_S = 1.0
"""An idle engine reports its statistics this often, which also shows that it is alive."""


class Steppable(Protocol):
    """The part of `loraserve.engine.engine.Engine` that the loop uses."""

    on_prompts_begun: Callable[[list[BegunPrompt]], None]

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]: ...

    def load_adapter(self, digest: str, packed_path: str) -> None: ...

    def unload_adapter(self, digest: str) -> None: ...

    def take_unloaded(self) -> list[str]: ...

    def step(self) -> list[SequenceOutput]: ...

    def has_work(self) -> bool: ...

    def use_idle_time(self) -> bool: ...

    def stats(self, *, list_residents: bool) -> EngineStats: ...


class Channel(Protocol):
    """The connection to the API process. Both methods raise `PeerGone` if that is gone."""

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All messages that have arrived; waits up to timeout_s for the first."""
        ...

    def send(self, message: FromEngine) -> None:
        """Wait until the message is handed over: an API process that does not read blocks the engine, so unread outputs
        never pile up here."""
        ...


class EngineLoop:
    """Runs until `Shutdown`, then finishes all unfinished requests with reason "abort"."""

    def __init__(self, engine: Steppable, channel: Channel) -> None:
        self._engine = engine
        engine.on_prompts_begun = lambda prompts: channel.send(PromptsBegun(prompts))
        self._channel = channel
        self._num_unfinished: dict[str, int] = {}
        """Number of choices whose finish_reason was not sent yet, per accepted request."""
        self._refusals: list[SequenceOutput] = []
        self._aborted: list[SequenceOutput] = []
        """Like `_refusals`, created between steps and sent with the next step's outputs."""
        self._next_stats_s = 0.0
        self._owes_residents = False
        """Whether the last statistics did not list the resident adapters."""
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            self.run_once(IDLE_HEARTBEAT_S)
        for request_id in self._num_unfinished:
            self._aborted += self._engine.abort(request_id)
        self._send_outputs([])

    def run_once(self, idle_timeout_s: float) -> None:
        busy = self._engine.has_work()
        if self._owes_residents:
            idle_timeout_s = min(idle_timeout_s, max(0.0, self._next_stats_s - time.monotonic()))
        messages = self._receive(0.0 if busy else idle_timeout_s)
        for message in messages:
            self._handle(message)
        if self._engine.has_work():
            self._send_outputs(self._engine.step())
        elif self._refusals or self._aborted or not messages:
            self._send_outputs([])
        if unloaded := self._engine.take_unloaded():
            # Statistics first: once an unload is acknowledged, they must no longer show the adapter.
            self._next_stats_s = 0.0
            self._send_outputs([])
            for digest in unloaded:
                self._channel.send(AdapterUnloaded(digest))

    def _receive(self, timeout_s: float) -> list[ToEngine]:
        """All messages that have arrived; waits up to timeout_s for the first. The engine does idle work while waiting,
        in slices; messages are checked for between them."""
        deadline_s = time.monotonic() + timeout_s
        messages = self._channel.receive(0.0)
        while not messages and (left_s := deadline_s - time.monotonic()) > 0:
            if not self._engine.use_idle_time():
                return self._channel.receive(left_s)
            messages = self._channel.receive(0.0)
        return messages

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                self._add(request)
            case Abort(request_id, index):
                self._aborted += self._engine.abort(request_id, index)
            case LoadAdapter(digest, packed_path):
                self._load(digest, packed_path)
            case UnloadAdapter(digest):
                self._engine.unload_adapter(digest)
            case Shutdown():
                self._stopping = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add_request(request)
        except EngineRequestError as error:
            # Not counted as finished choices: the id may be another request's.
            self._refusals += [
                SequenceOutput(
                    request.request_id,
                    index,
                    [],
                    finish_reason=FinishReason.ERROR,
                    error=str(error),
                    error_code=error.code,
                )
                for index in range(request.sampling.n)
            ]
        else:
            # Aborted choices of an earlier request with this id may not have been sent yet.
            num_unsent = self._num_unfinished.get(request.request_id, 0)
            self._num_unfinished[request.request_id] = num_unsent + request.sampling.n

    def _load(self, digest: str, packed_path: str) -> None:
        try:
            self._engine.load_adapter(digest, packed_path)
        except AdapterError as error:
            self._channel.send(AdapterFailed(digest, error.message))
        else:
            self._channel.send(AdapterLoaded(digest))

    def _send_outputs(self, outputs: list[SequenceOutput]) -> None:
        outputs = self._aborted + outputs
        for output in outputs:
            if output.finish_reason is not None:
                self._count_finished(output.request_id)
        outputs = self._refusals + outputs
        self._refusals, self._aborted = [], []
        now = time.monotonic()
        is_due = now >= self._next_stats_s
        has_stats = is_due or not self._engine.has_work()
        if outputs or has_stats:
            stats = self._engine.stats(list_residents=is_due) if has_stats else None
            self._channel.send(StepOutputs(outputs, stats))
        if has_stats:
            self._owes_residents = not is_due
        if is_due:
            interval_s = max((time.monotonic() - now) / MAX_STATS_SHARE, STATS_INTERVAL_S)
            self._next_stats_s = now + min(interval_s, IDLE_HEARTBEAT_S)

    def _count_finished(self, request_id: str) -> None:
        self._num_unfinished[request_id] -= 1
        if self._num_unfinished[request_id] == 0:
            del self._num_unfinished[request_id]
