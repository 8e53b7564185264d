from loraserve.engine.kv.blocks import root_hash
from loraserve.engine.queue_stats import queue_stats
from loraserve.engine.request import EngineRequest, QueueStats, SamplingParams
from loraserve.engine.scheduling.sequence import RequestState, Sequence, Status


def sequence(tenant: str, digest: str | None, *, num_prompt: int, num_computed: int, status: Status) -> Sequence:
    tokens = list(range(num_prompt))
    request = EngineRequest("r", tokens, SamplingParams(max_tokens=4), digest, "", tenant)
    state = RequestState(request, 0.0, root_hash("", "base", digest))
    # Two output tokens, which are not part of the prompt.
    return Sequence(state, 0, [*tokens, 7, 7], num_prompt, num_computed_tokens=num_computed, status=status)


def test_work_is_summed_by_tenant_and_adapter() -> None:
    found = queue_stats(
        [
            sequence("acme", "d", num_prompt=10, num_computed=11, status=Status.RUNNING),
            sequence("acme", None, num_prompt=5, num_computed=0, status=Status.WAITING),
            sequence("globex", "d", num_prompt=8, num_computed=3, status=Status.RUNNING),
            sequence("acme", "d", num_prompt=9, num_computed=0, status=Status.WAITING),
        ]
    )
    assert found == [
        QueueStats("acme", "d", 1, 1, 9),
        QueueStats("acme", None, 0, 1, 5),
        QueueStats("globex", "d", 1, 0, 5),
    ]


def test_an_idle_engine_has_no_queues() -> None:
    assert queue_stats([]) == []
