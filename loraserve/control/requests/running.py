"""The requests that run in this process, so that they can be counted, listed and ended from outside."""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from loraserve.control.names.resolve import ResolvedAdapter, Target
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.errors import ServingError
from loraserve.store.records import adapter_id


class Route(StrEnum):
    CHAT = "chat.completions"
    CLASSIFY = "classify"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    GENERATE = "generate"
    MESSAGES = "messages"
    RERANK = "rerank"
    RESPONSES = "responses"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class RouteInfo:
    """How a request arrived."""

    route: Route = Route.COMPLETIONS
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs, as far as that is known before its prompt is tokenized."""

    reserve_tokens: int
    num_sequences: int = 1
    route_info: RouteInfo = RouteInfo()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has got; None = not known yet."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    queue_ms: float | None = None
    adapter_load_ms: float | None = None
    ttft_ms: float | None = None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Admitted and not finished."""

    request_id: str
    principal: Principal
    target: Target
    received_at: float
    """Unix time of its arrival."""
    received_s: float
    """The same on a monotonic clock, for durations: the wall clock may be set in between."""
    num_sequences: int
    route_info: RouteInfo
    started: bool = False
    """Whether it has its first token; until then it counts as queued."""
    progress: Callable[[], Progress] = Progress
    """Set by its owner."""
    ended_with: ServingError | None = None
    """Why it was ended from outside."""
    _on_abort: list[Callable[[ServingError], None]] = field(default_factory=list)

    @property
    def tenant(self) -> str:
        return self.principal.acting_tenant

    def duration_ms(self, now_s: float) -> float:
        """now_s: as `received_s`."""
        return (now_s - self.received_s) * 1000

    def note_started(self) -> None:
        """It has its first token."""
        self.started = True

    def on_abort(self, callback: Callable[[ServingError], None]) -> None:
        """`callback` is called once the request is ended from outside; at once if it was already. It must not raise."""
        if self.ended_with is not None:
            callback(self.ended_with)
        else:
            self._on_abort.append(callback)

    def abort(self, error: ServingError) -> None:
        """End it: its stream closes with `error`. Only the first call has an effect."""
        if self.ended_with is not None:
            return
        self.ended_with = error
        callbacks, self._on_abort = self._on_abort, []
        for callback in callbacks:
            callback(error)

    def release(self) -> None:
        """It has ended. Drops references to its owner: as the owner refers to it, they would form a cycle."""
        self.progress = Progress
        self._on_abort.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """An admission in progress."""

    principal: Principal
    num_sequences: int
    adapter: ResolvedAdapter | None


class RunningRequests:
    """All methods are called on the event loop."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}
        self._entering: list[_Entry] = []
        self._ended: asyncio.Event | None = None
        """Set at the next end; None if nobody waits for one."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RunningRequest]:
        """A snapshot: requests may end during the iteration."""
        return iter([*self._requests.values()])

    def get(self, request_id: str) -> RunningRequest | None:
        return self._requests.get(request_id)

    def add(self, request: RunningRequest) -> None:
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Does nothing if it is gone."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.release()
        self._note_ended()

    @contextlib.contextmanager
    def entering(
        self, principal: Principal, num_sequences: int, adapter: ResolvedAdapter | None = None
    ) -> Generator[None]:
        """Inside, these sequences count as queued, so that a burst is counted before its first request is admitted, and
        tenant and adapter as in use: Redis may have admitted the request already."""
        entry = _Entry(principal, num_sequences, adapter)
        self._entering.append(entry)
        try:
            yield
        finally:
            self._entering.remove(entry)
            self._note_ended()

    def num_sequences(self) -> int:
        """Including those that are `entering`."""
        num_running = sum(request.num_sequences for request in self._requests.values())
        return num_running + sum(entry.num_sequences for entry in self._entering)

    def num_queued(self, tenant: str | None = None, key_id: str | None = None) -> int:
        """Sequences that have no token yet, including those that are `entering`: of a tenant, of a key, or all."""
        waiting = [request for request in self._requests.values() if not request.started]
        return sum(
            each.num_sequences
            for each in (*waiting, *self._entering)
            if (tenant is None or each.principal.acting_tenant == tenant)
            and (key_id is None or each.principal.key_id == key_id)
        )

    def num_of_tenant(self, tenant: str) -> int:
        return sum(request.tenant == tenant for request in self._requests.values())

    def has_any_of(self, tenant: str) -> bool:
        """Including those that are `entering`."""
        return tenant in self.tenants()

    def uses(self, tenant: str, name: str) -> bool:
        """Whether there is any request for the adapter, including those that are `entering`."""
        return adapter_id(tenant, name) in self.adapters()

    def tenants(self) -> set[str]:
        """Of all requests, including those that are `entering`."""
        return {each.principal.acting_tenant for each in (*self._requests.values(), *self._entering)}

    def adapters(self) -> set[str]:
        """Ids of their documents; likewise."""
        running = (request.target.adapter for request in self._requests.values())
        entering = (entry.adapter for entry in self._entering)
        return {adapter.document_id for adapter in (*running, *entering) if adapter is not None}

    def num_of_key(self, key_id: str) -> int:
        return sum(request.principal.key_id == key_id for request in self._requests.values())

    def of_adapter(self, tenant: str, name: str) -> list[RunningRequest]:
        return [request for request in self._requests.values() if _is_of(request.target.adapter, tenant, name)]

    async def wait_while(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Whether `condition`, which running requests keep true, turns false in time. Called again when one ends."""
        try:
            async with asyncio.timeout(timeout_s):
                while condition():
                    self._ended = self._ended or asyncio.Event()
                    await self._ended.wait()
        except TimeoutError:
            return not condition()
        return True

    def _note_ended(self) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None


def _is_of(adapter: ResolvedAdapter | None, tenant: str, name: str) -> bool:
    return adapter is not None and adapter.tenant == tenant and adapter.name == name
