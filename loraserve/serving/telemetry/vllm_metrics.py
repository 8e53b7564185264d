"""The fixed set of vLLM metrics that routers, autoscalers and dashboards use, with vLLM's names, labels and buckets."""

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loraserve.engine.config import MAX_RESIDENT_ADAPTERS
from loraserve.engine.request import FinishReason
from loraserve.serving.bound_adapter import AdapterNames, NamedContent
from loraserve.serving.engine_client import EngineClient

LABELS = ("model_name", "engine")
ENGINE = "0"
MAX_NAMES = 256
"""Maximum adapter names per label of vllm:lora_requests_info: running adapters first, then resident ones that requests
wait for, then the rest of device memory, most recently used first."""

# fmt: off
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0, 2560.0)
ITL_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0)
LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                     480.0, 960.0, 1920.0, 7680.0)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
# fmt: on


def buckets_1_2_5(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to max_value."""
    buckets: list[int] = []
    decade = 1
    while decade <= max_value:
        buckets += [step * decade for step in (1, 2, 5) if step * decade <= max_value]
        decade *= 10
    return buckets


class VllmMetrics:
    """Metrics updated by requests. Those counted by the engine are read from its stats at each scrape."""

    def __init__(self, engine: EngineClient, adapters: AdapterNames, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        lengths = buckets_1_2_5(engine.model.max_model_len)
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of started prompts.", LABELS, registry=self.registry
        ).labels(model_name, ENGINE)
        success = Counter(
            "vllm:request_success", "Finished choices.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self.request_success = {reason: success.labels(model_name, ENGINE, reason.value) for reason in FinishReason}
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", ITERATION_BUCKETS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", lengths)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a choice.", lengths
        )
        self.request_params_n = self._histogram("request_params_n", "Parameter n.", N_BUCKETS)
        self.request_params_max_tokens = self._histogram("request_params_max_tokens", "Parameter max_tokens.", lengths)
        self.ttft_s = self._histogram("time_to_first_token_seconds", "Received to first token.", TTFT_BUCKETS_S)
        self.itl_s = ItlHistogram(model_name)
        self.registry.register(self.itl_s)
        self.tpot_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap between a choice's tokens.", ITL_BUCKETS_S
        )
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "Received to finished.", LATENCY_BUCKETS_S)
        self.queue_s = self._histogram("request_queue_time_seconds", "Waiting in the engine.", LATENCY_BUCKETS_S)
        self.prefill_s = self._histogram("request_prefill_time_seconds", "Scheduled to first token.", LATENCY_BUCKETS_S)
        self.decode_s = self._histogram("request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS_S)
        self.inference_s = self._histogram(
            "request_inference_time_seconds", "Scheduled to last token.", LATENCY_BUCKETS_S
        )
        self.registry.register(_EngineCollector(engine, model_name))
        self.registry.register(_LoraInfoCollector(engine, adapters))

    def _histogram(self, name: str, text: str, buckets: "list[int] | tuple[float, ...]") -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name, ENGINE)


class ItlHistogram(Collector):
    """Exported under its current name and the one it had before vLLM renamed it. Observed for each token: 0.15 µs,
    against 0.75 for the histogram of `prometheus_client`."""

    NAMES = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")

    def __init__(self, model_name: str) -> None:
        self._values = (model_name, ENGINE)
        self._counts = [0] * (len(ITL_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        self._counts[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        edges = [floatToGoString(edge) for edge in (*ITL_BUCKETS_S, math.inf)]
        buckets = list(zip(edges, itertools.accumulate(self._counts), strict=True))
        for name in self.NAMES:
            family = HistogramMetricFamily(name, "Gap between tokens.", labels=LABELS)
            family.add_metric(self._values, buckets, self._sum_s)
            yield family


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._values = (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        stats, model = self._engine.stats, self._engine.model
        used_blocks = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        yield self._gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Waiting sequences.", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used_blocks / (stats.num_blocks or 1)
        )
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits)
        yield self._counter("num_preemptions", "Sequences preempted.", stats.num_preemptions)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.num_accepted_tokens)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "KV cache.", labels=("block_size", "num_gpu_blocks", "engine")
        )
        info.add_metric([str(model.block_size), str(model.num_blocks), ENGINE], 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._values, value)
        return family


class _LoraInfoCollector(Collector):
    """vllm:lora_requests_info as documented by the inference gateway's protocol: running = in device memory."""

    def __init__(self, engine: EngineClient, adapters: AdapterNames) -> None:
        self._engine = engine
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        adapters = self._adapters.contents()
        resident = stats.resident_adapters[::-1]
        waited = {*stats.waiting_adapters}
        loaded = dict.fromkeys([*stats.running_adapters, *(each for each in resident if each in waited), *resident])
        waiting = [digest for digest in stats.waiting_adapters if digest not in loaded]
        # Capacity depends on adapter sizes, up to a fixed number of adapters, so estimate it with the average size.
        mean_bytes = sum(adapter.size_bytes for adapter in adapters) / (len(adapters) or 1)
        num_fitting = int(stats.arena_size_bytes / mean_bytes) if mean_bytes else 0
        max_lora = max(len(loaded), min(num_fitting, MAX_RESIDENT_ADAPTERS))
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in device memory and adapters that requests wait for; the value is the Unix time.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        family.add_metric([str(max_lora), _names(adapters, loaded), _names(adapters, waiting)], time.time())
        yield family


def _names(adapters: list[NamedContent], digests: Iterable[str]) -> str:
    """The first `MAX_NAMES` names, sorted because each different text is a separate time series."""
    labels: dict[str, list[str]] = {}
    for adapter in adapters:
        labels.setdefault(adapter.digest, []).append(adapter.label)
    names = (label for digest in digests for label in labels.get(digest, ()))
    return ",".join(sorted(itertools.islice(names, MAX_NAMES)))
