"""Time between the tokens of running decodes when a request arrives whose adapter is not on the GPU yet (T3)."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from gpu.engine import checked, make_requests, share
from gpu.record import Arm, Figure, Record
from gpu.work import Work

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest


def while_adapters_load(engine: Engine, work: Work, digests: Sequence[str]) -> list[Record]:
    """The p99 of the time between two tokens of running decodes, while other requests arrive one after another.

    Each arrives twice: first with its adapter on the host, then with it on the device, so that only the copy differs.
    digests: all in the host's memory, and more than the device has room for; the decodes use the first ones.
    """
    used = digests[: work.num_used_while_loading]
    num_output = engine.describe().max_model_len - work.num_tokens
    decodes = make_requests(engine, share(used, work.loading_batch_size), work.num_tokens, num_output)
    for request in decodes:
        engine.add_request(request)
    records = []
    for num_prompt in work.loading_prompts:
        gaps_ms(engine, _arriving(engine, used[0], num_prompt), work.loading_steps)
        num_running = engine.stats().num_running
        assert num_running == len(decodes), f"{num_running} of {len(decodes)} requests decode"
        loading, loaded = [], []
        for _ in range(work.cold_repeats):
            resident = set(engine.stats().resident_adapters)
            cold = next(digest for digest in digests if digest not in resident)
            loading += gaps_ms(engine, _arriving(engine, cold, num_prompt), work.loading_steps)
            loaded += gaps_ms(engine, _arriving(engine, cold, num_prompt), work.loading_steps)
        about = (work.loading_batch_size, len(used), num_prompt, 1)
        for figure, values in ((Figure.GAP_LOADING, loading), (Figure.GAP_LOADED, loaded)):
            p99 = statistics.quantiles(values, n=100, method="inclusive")[-1]
            records.append(Record(Arm.LORA, figure, *about, p99, repeats=len(values)))
    for request in decodes:
        engine.abort(request.request_id)
    while engine.has_work():
        checked(engine.step())
    return records


def _arriving(engine: Engine, digest: str, num_prompt: int) -> EngineRequest:
    (request,) = make_requests(engine, [digest], num_prompt, 1)
    return replace(request, request_id="arriving")


def gaps_ms(engine: Engine, request: EngineRequest, num_steps: int) -> list[float]:
    """Gaps between step ends from the request's arrival until it has its only token; at least `num_steps`."""
    gaps, is_waiting = [], True
    before = time.perf_counter()
    engine.add_request(request)
    while is_waiting or len(gaps) < num_steps:
        outputs = checked(engine.step())
        now = time.perf_counter()
        gaps.append((now - before) * 1e3)
        before = now
        is_waiting = is_waiting and all(output.request_id != request.request_id for output in outputs)
    return gaps
