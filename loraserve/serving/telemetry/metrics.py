"""All metrics on /metrics: vLLM's names for tools that expect them, and our own with an `adapter` label."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraserve.engine.request import EngineStats, FinishReason
from loraserve.serving.bound_adapter import AdapterNames
from loraserve.serving.engine_client import EngineClient
from loraserve.serving.errors import SERVER_FAULTS, ErrorCode
from loraserve.serving.lifecycle import Lifecycle
from loraserve.serving.telemetry.adapter_labels import AdapterLabels
from loraserve.serving.telemetry.generation_times import ChoiceTimes
from loraserve.serving.telemetry.latency_totals import LatencyTotals
from loraserve.serving.telemetry.vllm_metrics import LATENCY_BUCKETS_S, TTFT_BUCKETS_S, VllmMetrics


class ServingMetrics:
    """Called on the event loop. One per app: nothing is global."""

    def __init__(
        self,
        engine: EngineClient,
        adapters: AdapterNames,
        lifecycle: Lifecycle,
        *,
        base_name: str,
        compat_metrics: bool,
    ) -> None:
        self._base_name = base_name
        self._compat_metrics = compat_metrics
        self._labels = AdapterLabels()
        self._last_snapshot: EngineStats | None = None
        self._latencies = LatencyTotals()
        self._uncounted_gaps_s: list[float] = []
        self._vllm = VllmMetrics(engine, adapters, base_name)
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "loraserve_requests", "Finished choices.", ("adapter", "finish_reason"), registry=registry
        )
        self._prompt_tokens = Counter("loraserve_prompt_tokens", "Prompt tokens.", ("adapter",), registry=registry)
        self._generation_tokens = Counter(
            "loraserve_generation_tokens", "Tokens generated and counted.", ("adapter",), registry=registry
        )
        self._ttft_s = Histogram(
            "loraserve_time_to_first_token_seconds",
            "Received to first token.",
            ("adapter",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._e2e_s = Histogram(
            "loraserve_request_latency_seconds",
            "Received to finished.",
            ("adapter",),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._errors = Counter("loraserve_errors", "Error responses.", ("code",), registry=registry)
        registry.register(_StateCollector(engine, adapters, lifecycle))

    def add(self, collector: Collector) -> None:
        """The collector is called at each `render`."""
        self._registry.register(collector)

    @property
    def latencies(self) -> LatencyTotals:
        self._count_gaps()
        return self._latencies

    def render(self) -> bytes:
        """Prometheus text format."""
        self._count_gaps()
        ours = generate_latest(self._registry)
        return ours + generate_latest(self._vllm.registry) if self._compat_metrics else ours

    def adapter_label(self, adapter: str | None) -> str:
        """Label for a request, until `request_ended`. adapter: its `BoundAdapter.label`; None = the base model."""
        return self._base_name if adapter is None else self._labels.acquire(adapter)

    def request_ended(self, label: str) -> None:
        """Call when the request will not count anything any more."""
        self._labels.leave(label)

    def forget_adapter(self, label: str) -> None:
        """Removes the series of a deleted adapter. Does nothing while a request uses the label; call it again after."""
        if self._labels.release(label):
            for metric in (self._requests, self._prompt_tokens, self._generation_tokens, self._ttft_s, self._e2e_s):
                metric.remove_by_labels({"adapter": label})

    def error(self, code: ErrorCode) -> None:
        self._errors.labels(code.value).inc()
        self._latencies.num_errors += code in SERVER_FAULTS

    def prompt_begun(self, label: str, num_prompt_tokens: int) -> None:
        """The engine has begun to compute the prompt."""
        self._prompt_tokens.labels(label).inc(num_prompt_tokens)
        self._vllm.prompt_tokens.inc(num_prompt_tokens)

    def request_params(self, n: int, max_tokens: int) -> None:
        """Parameters of a request that generates tokens."""
        self._vllm.request_params_n.observe(n)
        self._vllm.request_params_max_tokens.observe(max_tokens)

    def snapshot(self, stats: EngineStats) -> None:
        """Count a snapshot's steps, once per snapshot, and the gaps between tokens since the last snapshot."""
        if stats is not self._last_snapshot:
            self._last_snapshot = stats
            self._count_gaps()
            for num_tokens in stats.recent_step_tokens:
                self._vllm.iteration_tokens.observe(num_tokens)

    def tokens(self, label: str, times: ChoiceTimes, now_s: float) -> None:
        """A choice gained tokens."""
        if times.first_token_s is None:
            times.first_token_s = now_s
            self._ttft_s.labels(label).observe(now_s - times.received_s)
            self._vllm.ttft_s.observe(now_s - times.received_s)
            self._latencies.first_token(now_s - times.received_s)
        elif times.last_token_s is not None:
            self._uncounted_gaps_s.append(now_s - times.last_token_s)
        times.last_token_s = now_s

    def _count_gaps(self) -> None:
        """Counts the gaps of a tenth of a second together. Counted per token, between engine steps, each one would find
        its code and counters evicted from the CPU caches."""
        gaps_s, self._uncounted_gaps_s = self._uncounted_gaps_s, []
        for gap_s in gaps_s:
            self._vllm.itl_s.observe(gap_s)
            self._latencies.next_token(gap_s)

    def choice_finished(
        self,
        label: str,
        times: ChoiceTimes,
        reason: FinishReason,
        num_prompt_tokens: int,
        num_tokens: int,
        now_s: float,
    ) -> None:
        self._requests.labels(label, reason.value).inc()
        self._generation_tokens.labels(label).inc(num_tokens)
        self._e2e_s.labels(label).observe(now_s - times.received_s)
        vllm = self._vllm
        vllm.request_success[reason].inc()
        vllm.e2e_s.observe(now_s - times.received_s)
        vllm.request_prompt_tokens.observe(num_prompt_tokens)
        vllm.request_generation_tokens.observe(num_tokens)
        vllm.queue_s.observe(times.queue_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        scheduled_s = times.received_s + times.queue_s
        decode_s = times.last_token_s - times.first_token_s
        vllm.prefill_s.observe(max(0.0, times.first_token_s - scheduled_s))
        vllm.decode_s.observe(decode_s)
        vllm.inference_s.observe(max(0.0, times.last_token_s - scheduled_s))
        if num_tokens > 1:
            vllm.tpot_s.observe(decode_s / (num_tokens - 1))


class _StateCollector(Collector):
    """Values read from the engine and the adapters at each scrape."""

    def __init__(self, engine: EngineClient, adapters: AdapterNames, lifecycle: Lifecycle) -> None:
        self._engine = engine
        self._adapters = adapters
        self._lifecycle = lifecycle

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield gauge("engine_up", "1 while the engine is running.", self._engine.error is None)
        yield gauge("draining", "1 while the server accepts no new requests.", self._lifecycle.draining)
        yield gauge("sequences_in_flight", "Sequences admitted and not finished.", self._lifecycle.num_sequences)
        yield gauge("adapters_registered", "Adapters with a name.", len(self._adapters.contents()))
        yield gauge("adapters_resident", "Adapters in the arena.", len(stats.resident_adapters))
        yield gauge("arena_size_bytes", "Size of the adapter arena.", stats.arena_size_bytes)
        yield gauge("arena_used_bytes", "Bytes of the arena in use.", stats.arena_used_bytes)
        yield gauge("kv_blocks", "KV blocks.", stats.num_blocks)
        yield gauge("kv_blocks_free", "Empty KV blocks.", stats.num_free_blocks)
        yield gauge("kv_blocks_cached", "Unreferenced KV blocks that hold a prefix.", stats.num_cached_blocks)
        yield _counter("engine_steps", "Engine steps.", stats.step)
        yield _counter("computed_prompt_tokens", "Prompt tokens computed.", stats.num_prompt_tokens)
        yield _counter("adapter_loads", "Adapters copied into the arena.", stats.num_adapter_loads)
        yield _counter("adapter_evictions", "Adapters evicted from the arena.", stats.num_adapter_evictions)
        yield _counter("adapter_reloads", "Adapters loaded again after an eviction.", stats.num_adapter_reloads)


def gauge(name: str, text: str, value: float) -> Metric:
    """Named `loraserve_<name>`."""
    return GaugeMetricFamily(f"loraserve_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"loraserve_{name}", text, value=value)
