import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from loraserve.engine.config import MAX_RESIDENT_ADAPTERS
from loraserve.engine.request import EngineStats, SamplingParams
from loraserve.serving.bound_adapter import BoundAdapter, NamedContent
from loraserve.serving.generation import GenerationJob, Prompt, collect
from loraserve.serving.runtime import Runtime, build_runtime
from loraserve.serving.telemetry.adapter_labels import MAX_LABELS, OTHER
from loraserve.serving.telemetry.vllm_metrics import MAX_NAMES, ItlHistogram, buckets_1_2_5
from loraserve.serving.text.choice import TextOptions
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import make_settings
from tests.support.named_adapters import NamedAdapters

CLOSED_LIST = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "request_success_total",
    "iteration_tokens_total_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "cache_config_info",
    "lora_requests_info",
}


def samples(runtime: Runtime) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(runtime.metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def generate(runtime: Runtime, adapter: str | None = None) -> None:
    resolved = BoundAdapter(adapter, adapter, "d" * 64) if adapter else None
    text = TextOptions(eos_token_ids=frozenset({1}))
    await collect(
        runtime.generation.start(
            GenerationJob([Prompt([9, 9, 9], SamplingParams(4, n=2))], resolved, text, 0.0)
        ).steps()
    )


def test_the_closed_list_of_vllm_names_is_complete_and_labeled() -> None:
    async def run() -> None:
        runtime = build_runtime(FakeEngine(), make_settings(Path("/nonexistent")), NamedAdapters())
        await generate(runtime)
        found = samples(runtime)
        assert {f"vllm:{name}" for name in CLOSED_LIST} <= found.keys()
        for name in CLOSED_LIST - {"cache_config_info", "lora_requests_info"}:
            for labels, _ in found[f"vllm:{name}"]:
                assert (labels["model_name"], labels["engine"]) == ("tiny", "0")
        values = {name: sum(value for _, value in rows) for name, rows in found.items()}
        assert values["vllm:prompt_tokens_total"] == 3
        assert values["vllm:request_success_total"] == 2
        assert values["vllm:request_generation_tokens_sum"] == 8
        assert values["vllm:inter_token_latency_seconds_count"] == 6
        assert values["vllm:time_to_first_token_seconds_count"] == 2
        assert values["vllm:request_params_n_sum"] == 2
        assert values["vllm:iteration_tokens_total_count"] == 4
        assert found["vllm:cache_config_info"][0][0]["num_gpu_blocks"] == "100"

    asyncio.run(run())


def test_a_gap_is_counted_under_both_names_in_its_bucket_and_in_all_above() -> None:
    histogram = ItlHistogram("tiny")
    for gap_s in (0.005, 0.01, 0.011, 100.0):
        histogram.observe(gap_s)
    families = [*histogram.collect()]
    assert [family.name for family in families] == [*ItlHistogram.NAMES]
    for family in families:
        counts = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
        assert (counts["0.01"], counts["0.025"], counts["80.0"], counts["+Inf"]) == (2, 3, 3, 4)
        totals = {s.name.removeprefix(family.name): s.value for s in family.samples if "le" not in s.labels}
        assert totals == {"_count": 4, "_sum": 100.026}


def test_compat_names_can_be_switched_off() -> None:
    runtime = build_runtime(FakeEngine(), make_settings(Path("/nonexistent"), compat_metrics=False), NamedAdapters())
    assert b"vllm:" not in runtime.metrics.render()
    assert b"loraserve_engine_up 1.0" in runtime.metrics.render()


def test_gauges_follow_the_engines_snapshot() -> None:
    engine = FakeEngine()
    runtime = build_runtime(engine, make_settings(Path("/nonexistent")), NamedAdapters())
    engine.stats = EngineStats(num_running=3, num_waiting=2, num_blocks=100, num_free_blocks=60, num_cached_blocks=20)
    found = samples(runtime)
    assert found["vllm:num_requests_running"][0][1] == 3
    assert found["vllm:kv_cache_usage_perc"][0][1] == 0.2
    assert found["loraserve_kv_blocks_cached"][0][1] == 20


def test_lora_requests_info_names_loaded_and_waiting_adapters() -> None:
    engine = FakeEngine()
    adapters = NamedAdapters([NamedContent(name, f"digest-{name}", 4096) for name in ("a", "b", "c")])
    runtime = build_runtime(engine, make_settings(Path("/nonexistent")), adapters)
    engine.stats = EngineStats(
        resident_adapters=["digest-a"],
        running_adapters=["digest-b"],
        waiting_adapters=["digest-a", "digest-c"],
        arena_size_bytes=4096 * 5,
    )
    ((labels, value),) = samples(runtime)["vllm:lora_requests_info"]
    assert labels == {"max_lora": "5", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert value > 1.6e9


def test_lora_requests_info_says_no_more_adapters_than_the_arena_can_hold() -> None:
    engine = FakeEngine()
    adapters = NamedAdapters([NamedContent("a", "digest-a", 4096)])
    runtime = build_runtime(engine, make_settings(Path("/nonexistent")), adapters)
    engine.stats = EngineStats(arena_size_bytes=4096 * 100_000)
    ((labels, _),) = samples(runtime)["vllm:lora_requests_info"]
    assert labels["max_lora"] == str(MAX_RESIDENT_ADAPTERS)


def test_lora_requests_info_names_running_then_waiting_then_last_used_adapters_up_to_a_maximum() -> None:
    engine = FakeEngine()
    names = [f"a{number:04}" for number in range(400)]
    adapters = NamedAdapters([NamedContent(name, f"digest-{name}", 4096) for name in names])
    runtime = build_runtime(engine, make_settings(Path("/nonexistent")), adapters)
    engine.stats = EngineStats(
        resident_adapters=[f"digest-{name}" for name in [*names[300:], *names[:300]]],
        running_adapters=["digest-a0399"],
        waiting_adapters=["digest-a0350"],
    )
    ((labels, _),) = samples(runtime)["vllm:lora_requests_info"]
    assert MAX_NAMES == 256
    assert labels["running_lora_adapters"].split(",") == [*names[46:300], "a0350", "a0399"]
    assert labels["waiting_lora_adapters"] == ""


def test_adapter_labels_are_bounded_and_removed_with_the_adapter() -> None:
    async def run() -> None:
        runtime = build_runtime(FakeEngine(), make_settings(Path("/nonexistent")), NamedAdapters())
        for number in range(MAX_LABELS + 2):
            await generate(runtime, f"a{number}")
        await generate(runtime)
        rows = samples(runtime)["loraserve_requests_total"]
        assert len(rows) == MAX_LABELS + 2
        by_label = {labels["adapter"]: value for labels, value in rows}
        assert by_label[OTHER] == 4
        assert by_label["tiny"] == 2
        runtime.metrics.forget_adapter("a0")
        assert b'adapter="a0"' not in runtime.metrics.render()
        runtime.metrics.forget_adapter("never used")
        runtime.metrics.forget_adapter("a1")
        label = runtime.metrics.adapter_label("a2")
        runtime.metrics.forget_adapter("a2")
        assert b'adapter="a2"' in runtime.metrics.render()
        runtime.metrics.prompt_begun(label, 1)
        runtime.metrics.request_ended(label)
        runtime.metrics.forget_adapter("a2")
        assert b'adapter="a2"' not in runtime.metrics.render()

    asyncio.run(run())


def test_two_runtimes_share_no_metrics() -> None:
    async def run() -> None:
        settings = make_settings(Path("/nonexistent"))
        first, second = (
            build_runtime(FakeEngine(), settings, NamedAdapters()),
            build_runtime(FakeEngine(), settings, NamedAdapters()),
        )
        await generate(first)
        assert "loraserve_requests_total" not in samples(second)

    asyncio.run(run())


def test_buckets_1_2_5_end_at_the_maximum() -> None:
    assert buckets_1_2_5(50) == [1, 2, 5, 10, 20, 50]
    assert buckets_1_2_5(49) == [1, 2, 5, 10, 20]
    assert buckets_1_2_5(1) == [1]
