"""A response's timings: headers, and the `metrics` object for requests with `include_metrics`."""

from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.serving.generation import Generation


def timing_headers(generation: Generation, adapter_load_ms: float | None) -> dict[str, str]:
    """Empty if nothing was generated yet: headers cannot be changed later."""
    times = generation.times()
    if times.queue_ms is None or times.ttft_ms is None:
        return {}
    headers = {
        "x-queue-ms": f"{times.queue_ms:.3f}",
        "x-ttft-ms": f"{times.ttft_ms:.3f}",
        "x-cached-tokens": str(generation.usage().num_cached_tokens),
    }
    if adapter_load_ms is not None:
        headers["x-adapter-load-ms"] = f"{adapter_load_ms:.3f}"
    return headers


def request_metrics(
    generation: Generation, adapter_load_ms: float | None, adapter_version: int | None
) -> RequestMetrics:
    times, usage = generation.times(), generation.usage()
    num_choices = sum(len(prompt.choices) for prompt in generation.prompts)
    num_gaps = usage.num_completion_tokens - num_choices
    generation_ms = times.generation_ms
    return RequestMetrics(
        queue_time_ms=_rounded(times.queue_ms),
        adapter_load_ms=_rounded(adapter_load_ms),
        time_to_first_token_ms=_rounded(times.ttft_ms),
        generation_time_ms=_rounded(generation_ms),
        mean_itl_ms=_rounded(generation_ms * num_choices / num_gaps) if generation_ms and num_gaps > 0 else None,
        tokens_per_second=_rounded(num_gaps / generation_ms * 1000) if generation_ms and num_gaps > 0 else None,
        cached_tokens=usage.num_cached_tokens,
        adapter_version=adapter_version,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
