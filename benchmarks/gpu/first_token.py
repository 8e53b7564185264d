"""How long first tokens take on a GPU: of prompts with adapters, and with an adapter that is not there yet (T3)."""

import statistics
from collections.abc import Sequence

from gpu.engine import first_tokens_s, make_requests, share
from gpu.record import Arm, Figure, Record
from gpu.work import Prefill, Work

from loraserve.engine.engine import Engine

FROM_HOST = (Figure.FROM_HOST, Figure.FROM_HOST_ADDS)
FROM_FILE = (Figure.FROM_FILE, Figure.FROM_FILE_ADDS)


def prefill(engine: Engine, work: Work, arm: Arm, prompts: Prefill, digests: Sequence[str]) -> list[Record]:
    """digests: none = the base model. The first round warms up and brings the adapters to the device."""
    used = digests[: prompts.num_adapters]
    shared = share(used, prompts.batch_size)
    times = [
        first_tokens_s(engine, make_requests(engine, shared, prompts.prompt_tokens, 1))
        for _ in range(1 + work.prefill_repeats)
    ]
    about = (prompts.batch_size, len(used), prompts.prompt_tokens, 1)
    return [Record(arm, Figure.PREFILL, *about, statistics.median(times[1:]) * 1e3)]


def use_once(engine: Engine, work: Work, digests: Sequence[str]) -> None:
    """One after the other. Then all that fit are in the host's memory, and the last of them on the device."""
    for digest in digests:
        _first_token_s(engine, digest, min(work.cold_prompts))


def cold_start(
    engine: Engine, work: Work, figures: tuple[Figure, Figure], used_digest: str, cold_digests: Sequence[str]
) -> list[Record]:
    """T3: medians, over adapters that are not on the device, of the time to the first token and of what was added.

    What is added is the difference to the same adapter's next request. used_digest: of another one, which has the
    kernels compiled and the caches warm before.
    """
    records = []
    for index, num_prompt in enumerate(work.cold_prompts):
        _first_token_s(engine, used_digest, num_prompt)
        cold, added = [], []
        for digest in cold_digests[index * work.cold_repeats :][: work.cold_repeats]:
            assert digest not in engine.stats().resident_adapters, f"adapter {digest[:12]} is on the device already"
            cold.append(_first_token_s(engine, digest, num_prompt))
            added.append(cold[-1] - _first_token_s(engine, digest, num_prompt))
        about = (1, 1, num_prompt, 1)
        for figure, values in zip(figures, (cold, added), strict=True):
            records.append(Record(Arm.LORA, figure, *about, statistics.median(values) * 1e3))
    return records


def _first_token_s(engine: Engine, digest: str, num_prompt: int) -> float:
    return first_tokens_s(engine, make_requests(engine, [digest], num_prompt, 1))
