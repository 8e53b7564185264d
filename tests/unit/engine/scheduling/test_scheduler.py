from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.kv.blocks import BlockPool, root_hash
from loraserve.engine.request import BegunPrompt, EngineRequest, SamplingParams
from loraserve.engine.scheduling import scheduler
from loraserve.engine.scheduling.scheduler import (
    COLD_LOAD_TOKENS,
    MAX_BYPASSED,
    MAX_CLOSED_STEPS,
    MAX_PROMPT_LOGPROB_ROWS,
    Scheduler,
    StepPlan,
)
from loraserve.engine.scheduling.sequence import RequestState, Sequence, Status
from tests.support.host_accelerator import HostAccelerator
from tests.support.manual_threads import use_manual_threads, wait
from tests.support.packed_adapters import TinyAdapter, damage, make_adapter_memory

SMALL, OTHER_SMALL, LARGE = TinyAdapter(1, 1), TinyAdapter(2, 1), TinyAdapter(3, 4)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyAdapter, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {adapter: adapter.write(folder) for adapter in (SMALL, OTHER_SMALL, LARGE)}


@pytest.fixture
def memory(paths: dict[TinyAdapter, Path]) -> AdapterMemory:
    """Room for the two small adapters, or for the large one alone."""
    memory = make_adapter_memory(4)
    for adapter, path in paths.items():
        memory.add(adapter.digest, str(path))
    return memory


class Bench:
    """A scheduler and an engine that carries out its plans; every new token is 0."""

    def __init__(
        self,
        num_blocks: int = 100,
        budget: int = 16,
        max_num_seqs: int = 8,
        max_loras: int | None = None,
        adapters: AdapterMemory | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.scheduler = Scheduler(
            pool=self.pool,
            block_size=4,
            adapters=adapters,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_loras=max_loras,
        )
        self.finished: list[str] = []
        self.begun: list[BegunPrompt] = []
        self.charged = 0.0
        self._charge, self.scheduler.waiting.charge = self.scheduler.waiting.charge, self._count
        self._names = count()

    def add(
        self,
        num_prompt: int | list[int],
        *,
        name: str | None = None,
        max_tokens: int = 100,
        n: int = 1,
        tenant: str = "t",
        weight: float = 1.0,
        adapter: TinyAdapter | None = None,
        salt: str = "",
        prompt_logprobs: int | None = None,
        priority: int = 0,
    ) -> RequestState:
        """num_prompt: the prompt's tokens, or how many tokens that no other prompt contains."""
        number = next(self._names)
        tokens = num_prompt if isinstance(num_prompt, list) else [1000 * number + i for i in range(num_prompt)]
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs)
        digest = None if adapter is None else adapter.digest
        request = EngineRequest(name or f"r{number}", tokens, params, digest, salt, tenant, weight, priority)
        state = RequestState(request, float(number), root_hash(salt, "base", digest))
        state.sequences.append(Sequence(state, 0, list(tokens), len(tokens)))
        self.scheduler.add(state)
        return state

    def _count(self, tenant: str, num_tokens: float) -> None:
        self.charged += num_tokens
        self._charge(tenant, num_tokens)

    @property
    def names_begun(self) -> list[str]:
        return [prompt.request_id for prompt in self.begun]

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert sum(item.num_rows for item in plan.scheduled) <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        slots = [item.sequence.adapter_slot for item in plan.scheduled]
        assert slots == sorted(slots)
        self.begun += plan.begun
        for item in plan.scheduled:
            self._compute(item.sequence, item.num_rows)
        self.scheduler.check_invariants()
        return plan

    def _compute(self, sequence: Sequence, num_rows: int) -> None:
        state = sequence.state
        sequence.num_computed_tokens += num_rows
        if sequence.num_uncomputed_tokens > 0:
            return
        choices = [sequence] if state.is_forked else self.scheduler.fork(sequence)
        if state.wants_prompt_logprobs:
            state.prompt_logprobs = [None] * len(state.request.prompt_token_ids)
        for choice in choices:
            self.scheduler.remember_blocks(choice)
            choice.token_ids.append(0)
            if choice.num_output_tokens == state.request.sampling.max_tokens:
                self.scheduler.finish(choice)
                self.finished.append(state.request.request_id)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(100):
            if is_done():
                return
            self.step()
        pytest.fail("never reached")

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                assert self.pool.counts().referenced == 0
                return
            plan = self.step()
            assert plan.scheduled or plan.failed, "a step with work to do did nothing"
        pytest.fail("not idle")


def rows(plan: StepPlan) -> dict[str, int]:
    return {item.sequence.request.request_id: item.num_rows for item in plan.scheduled}


# ---- the token budget


def test_a_long_prompt_is_computed_in_chunks() -> None:
    bench = Bench(budget=16)
    bench.add(40, name="long")
    plans = [bench.step() for _ in range(4)]
    assert [rows(plan)["long"] for plan in plans] == [16, 16, 8, 1]
    assert [plan.scheduled[0].num_sampled_rows for plan in plans] == [0, 0, 1, 1]


def test_a_prompt_never_stalls_the_decodes() -> None:
    bench = Bench(budget=16)
    bench.add(40, name="long")
    bench.add(3, name="short")
    bench.step()
    bench.step()
    assert rows(bench.step()) == {"long": 8, "short": 3}
    bench.add(40, name="longer")
    for num_rows in (14, 14, 12):
        assert rows(bench.step()) == {"long": 1, "short": 1, "longer": num_rows}


def test_a_long_prompt_leaves_half_the_rows_to_a_waiting_tenant_that_was_not_served_more() -> None:
    bench = Bench(num_blocks=200, budget=16, max_num_seqs=3)
    bench.add(100, name="long", tenant="a")
    bench.step()
    bench.add(100, name="behind it", tenant="a")
    assert rows(bench.step()) == {"long": 16}, "one tenant's prompts come one after another"
    bench.add(12, name="short", tenant="b")
    assert rows(bench.step()) == {"long": 8, "short": 8}
    assert rows(bench.step()) == {"long": 16}, "both had as much"
    assert rows(bench.step()) == {"long": 12, "short": 4}


def test_a_long_prompt_leaves_no_rows_for_a_request_without_a_free_seat() -> None:
    bench = Bench(num_blocks=200, budget=16, max_num_seqs=1)
    bench.add(40, name="long", tenant="a")
    bench.step()
    bench.add(4, name="short", tenant="b")
    assert rows(bench.step()) == {"long": 16}


def test_decodes_take_turns_if_there_are_more_sequences_than_rows() -> None:
    bench = Bench(budget=2)
    state = bench.add(2, n=5, max_tokens=9)
    for _ in range(11):
        bench.step()
    assert {sequence.num_output_tokens for sequence in state.sequences} == {5}


def test_the_rest_of_the_budget_goes_to_the_next_prompt() -> None:
    bench = Bench(budget=16)
    for name in ("1", "2", "3"):
        bench.add(7, name=name)
    assert rows(bench.step()) == {"1": 7, "2": 7, "3": 2}


def test_prompt_logprob_rows_are_all_sampled_and_limited_per_step() -> None:
    bench = Bench(num_blocks=200, budget=1000)
    bench.add(MAX_PROMPT_LOGPROB_ROWS + 44, name="r", prompt_logprobs=0)
    plan = bench.step()
    assert (plan.scheduled[0].num_rows, plan.scheduled[0].num_sampled_rows) == (MAX_PROMPT_LOGPROB_ROWS,) * 2
    plan = bench.step()
    assert (plan.scheduled[0].num_rows, plan.scheduled[0].num_sampled_rows) == (44, 44)
    plan = bench.step()
    assert (plan.scheduled[0].num_rows, plan.scheduled[0].num_sampled_rows) == (1, 1)


# ---- seats


def test_a_request_with_more_choices_than_free_seats_waits_and_is_not_overtaken() -> None:
    bench = Bench(max_num_seqs=4)
    bench.add(2, name="first", n=2, max_tokens=3)
    bench.add(2, name="wide", n=3, max_tokens=1)
    bench.add(2, name="narrow", max_tokens=1)
    for _ in range(3):
        assert rows(bench.step()).keys() == {"first"}
    assert rows(bench.step()).keys() == {"wide", "narrow"}


def test_seats_are_reserved_for_choices_that_are_not_forked_yet() -> None:
    bench = Bench(max_num_seqs=4, budget=4)
    bench.add(8, name="wide", n=4)
    bench.step()
    bench.add(1, name="other")
    bench.step()
    assert len(bench.scheduler.running) == 4
    assert "other" not in rows(bench.step())


# ---- prefix cache


def test_a_repeated_prompt_hits_the_prefix_cache_except_for_the_block_of_its_last_token() -> None:
    bench = Bench()
    tokens = list(range(8))
    bench.add(tokens, name="1", max_tokens=1)
    bench.run()
    bench.add(tokens, name="2", max_tokens=1)
    assert rows(bench.step()) == {"2": 4}
    bench.add([*tokens, 99], name="3", max_tokens=1)
    assert rows(bench.step()) == {"3": 1}
    assert [(prompt.request_id, prompt.num_cached_tokens) for prompt in bench.begun] == [("1", 0), ("2", 4), ("3", 8)]
    assert (bench.scheduler.prefix_cache_queries, bench.scheduler.prefix_cache_hits) == (25, 12)


@pytest.mark.parametrize(("salt", "adapter"), [("other", None), ("", SMALL)])
def test_another_salt_or_adapter_misses_the_prefix_cache(
    salt: str, adapter: TinyAdapter | None, memory: AdapterMemory
) -> None:
    bench = Bench(adapters=memory)
    tokens = list(range(12))
    bench.add(tokens, max_tokens=1)
    bench.run()
    bench.add(tokens, salt=salt, adapter=adapter)
    assert list(rows(bench.step()).values()) == [12]
    assert bench.begun[-1].num_cached_tokens == 0


def test_blocks_of_a_partly_computed_prompt_are_not_findable() -> None:
    bench = Bench(budget=8)
    tokens = list(range(12))
    bench.add(tokens, name="1")
    bench.step()
    bench.add(tokens, name="2")
    plan = bench.step()
    assert rows(plan) == {"1": 4, "2": 4}
    assert [(prompt.request_id, prompt.num_cached_tokens) for prompt in plan.begun] == [("2", 0)]


def test_prompt_logprobs_skip_the_cache() -> None:
    bench = Bench()
    tokens = list(range(12))
    bench.add(tokens, max_tokens=1)
    bench.run()
    bench.add(tokens, name="asks", prompt_logprobs=1)
    assert rows(bench.step()) == {"asks": 12}


# ---- choices


def test_choices_share_the_prompts_blocks_and_copy_the_one_they_write() -> None:
    bench = Bench()
    state = bench.add(6, n=3)
    bench.step()
    tables = [sequence.blocks for sequence in state.sequences]
    assert tables[0] == tables[1] == tables[2]
    shared = tables[0][1]
    plan = bench.step()
    assert [source for source, _ in plan.block_copies] == [shared, shared]
    last = [sequence.blocks[1] for sequence in state.sequences]
    assert len(set(last)) == 3
    assert {copy for _, copy in plan.block_copies} | {shared} == set(last)
    assert bench.step().block_copies == []


def test_choices_copy_no_block_if_the_prompt_ends_at_a_block_boundary() -> None:
    bench = Bench()
    bench.add(8, n=3)
    bench.step()
    assert bench.step().block_copies == []


def test_each_choice_holds_its_own_reference_to_the_adapter(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory)
    state = bench.add(6, n=3, adapter=SMALL)
    bench.step()
    memory.check_invariants({SMALL.digest: 3})
    for num_left, sequence in zip((2, 1, 0), list(state.sequences), strict=True):
        bench.scheduler.finish(sequence)
        memory.check_invariants({SMALL.digest: num_left} if num_left else {})


# ---- preemption


def test_preempts_the_newest_sequence_of_the_most_served_tenant_when_blocks_run_out() -> None:
    bench = Bench(num_blocks=6)
    for name, tenant in (("light", "light"), ("old", "heavy"), ("new", "heavy")):
        bench.add(7, name=name, tenant=tenant)
    bench.step()
    bench.step()
    plan = bench.step()
    assert bench.scheduler.num_preemptions == 1
    assert [s.request.request_id for s in bench.scheduler.waiting] == ["new"]
    assert rows(plan) == {"light": 1, "old": 1}


def test_a_preempted_sequence_returns_its_rows_to_the_step() -> None:
    """The most-served tenant's decode is scheduled first; then the other tenant's decode needs its block."""
    bench = Bench(num_blocks=4, budget=8)
    heavy = bench.add(5, name="heavy", tenant="heavy").sequences[0]
    bench.add(6, name="light", tenant="light")
    bench.step()
    bench.step()
    bench.scheduler.waiting.charge("heavy", 100)
    while bench.scheduler.num_preemptions == 0:
        plan = bench.step()
    assert rows(plan) == {"light": 1}
    assert (heavy.status, heavy.blocks, heavy.num_computed_tokens) == (Status.WAITING, [], 0)


def test_rows_of_a_preempted_sequence_go_to_the_next_one_within_the_budget() -> None:
    """A decode is preempted because another needs a block; the prompt after them gets its row and no more."""
    bench = Bench(num_blocks=60, budget=8)
    heavy = bench.add(18, name="heavy", tenant="heavy").sequences[0]
    bench.run_until(lambda: heavy.num_output_tokens > 0)
    light = bench.add(6, name="light", tenant="light").sequences[0]
    bench.run_until(lambda: light.num_output_tokens > 0)
    bench.add(100, name="long", tenant="long")
    bench.run_until(lambda: light.num_computed_tokens % 4 == 0 and heavy.num_computed_tokens % 4 != 0)
    bench.scheduler.waiting.charge("heavy", 1000)
    bench.pool.try_allocate(bench.pool.num_available)
    assert rows(bench.scheduler.schedule()) == {"light": 1, "long": 7}
    assert heavy.status is Status.WAITING


def test_no_sequence_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(num_blocks=4)
    bench.add(7, name="old")
    bench.add(7, name="new")
    bench.step()
    bench.step()
    bench.add(1, name="late")
    assert rows(bench.step()) == {"old": 1}
    assert bench.scheduler.num_preemptions == 1
    assert len(bench.scheduler.waiting) == 2


def test_tokens_recomputed_after_preemption_are_not_charged_again() -> None:
    bench = Bench(num_blocks=6)
    for name in ("1", "2", "3"):
        bench.add(7, name=name, max_tokens=10)
    bench.scheduler.waiting.arrive("t")  # keeps the tenant's counter
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    # Every prompt token, and every output token except the last, is computed; each is charged once.
    assert bench.scheduler.waiting.served("t") == 3 * (7 + 9)


def test_the_oldest_sequence_of_a_single_tenant_is_never_preempted() -> None:
    bench = Bench(num_blocks=6, budget=8)
    first = bench.add(7, name="first", max_tokens=17)
    for _ in range(4):
        bench.add(7, max_tokens=17)
    while not bench.finished:
        bench.step()
        assert first.sequences[0].status is not Status.WAITING
    assert bench.finished == ["first"]
    assert bench.scheduler.num_preemptions > 0


def test_readmission_after_preemption_does_not_count_as_a_prefix_cache_hit() -> None:
    bench = Bench(num_blocks=8, budget=64)
    bench.add(16, name="1", max_tokens=8)
    bench.add(12, name="2", max_tokens=8)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    hits = bench.scheduler.prefix_cache_hits
    bench.run()
    assert bench.scheduler.prefix_cache_hits == hits, "a return from preemption is not a lookup of a prompt"
    assert sorted(bench.finished) == ["1", "2"]


# ---- fairness


def test_a_single_request_does_not_wait_for_another_tenants_backlog() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(50):
        bench.add(8, tenant="flood", max_tokens=4)
    bench.step()
    bench.add(8, name="single", tenant="single", max_tokens=4)
    for _ in range(8):
        bench.step()
    assert "single" in bench.finished


def test_backlogged_tenants_are_served_equally_whatever_the_size_of_their_requests() -> None:
    bench = Bench(max_num_seqs=4)
    for _ in range(60):
        bench.add(2, tenant="short", max_tokens=4)
    for _ in range(60):
        bench.add(14, tenant="long", max_tokens=12)
    gap = 0.0
    served = bench.scheduler.waiting.served
    for _ in range(60):
        bench.step()
        gap = max(gap, abs(served("short") - served("long")))
    assert gap <= 4 * (14 + 12), "more than what the running sequences of one tenant can take"


def test_a_tenant_with_three_times_the_weight_is_served_three_times_as_much() -> None:
    bench = Bench(max_num_seqs=1, num_blocks=8)
    for _ in range(60):
        bench.add(4, name="heavy", tenant="heavy", weight=3.0, max_tokens=4)
        bench.add(4, name="light", tenant="light", max_tokens=4)
    while len(bench.names_begun) < 40:
        bench.step()
    assert 28 <= bench.names_begun.count("heavy") <= 32


def test_a_cold_load_is_charged_once_to_the_tenant_that_causes_it(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory)
    bench.add(3, tenant="cold", adapter=SMALL)
    bench.step()
    assert bench.scheduler.waiting.served("cold") == 3 + COLD_LOAD_TOKENS
    bench.add(3, tenant="cold", adapter=SMALL)
    bench.step()
    assert bench.scheduler.waiting.served("cold") == 3 + COLD_LOAD_TOKENS + 1 + 3


def test_cached_prompt_tokens_are_not_charged() -> None:
    bench = Bench()
    tokens = list(range(9))
    bench.add(tokens, max_tokens=1)
    bench.run()
    bench.add(tokens, tenant="again")
    bench.step()
    assert bench.scheduler.waiting.served("again") == 1


# ---- adapters


def test_at_most_max_loras_adapters_run_at_once_not_counting_the_base_model(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory, max_loras=1)
    bench.add(2, name="one", adapter=SMALL)
    bench.add(2, name="two", adapter=OTHER_SMALL)
    bench.add(2, name="base")
    bench.add(2, name="also one", adapter=SMALL)
    assert rows(bench.step()).keys() == {"one", "base", "also one"}


def test_a_request_whose_adapter_does_not_fit_is_overtaken_by_requests_whose_adapters_fit(
    memory: AdapterMemory,
) -> None:
    bench = Bench(adapters=memory)
    bench.add(2, name="small", adapter=SMALL, max_tokens=3)
    bench.add(2, name="large", adapter=LARGE, max_tokens=3)
    bench.add(2, name="other", adapter=OTHER_SMALL, max_tokens=3)
    assert rows(bench.step()).keys() == {"small", "other"}
    bench.run()
    assert bench.finished == ["small", "other", "large"]


def test_a_request_whose_blocks_do_not_fit_is_not_overtaken() -> None:
    bench = Bench(num_blocks=4)
    bench.add(10, name="running", max_tokens=2)
    bench.step()
    bench.add(10, name="long")
    bench.add(1, name="short")
    assert rows(bench.step()).keys() == {"running"}
    assert rows(bench.step()).keys() == {"long", "short"}


@pytest.mark.parametrize("max_loras", [None, 1])
def test_a_prompt_is_not_hashed_while_there_is_no_room_for_its_adapter(
    memory: AdapterMemory, max_loras: int | None
) -> None:
    """Thousands of requests may be waiting, and one step may try all of them."""
    bench = Bench(adapters=memory, max_loras=max_loras)
    running = LARGE if max_loras is None else OTHER_SMALL
    bench.add(2, adapter=running, max_tokens=3)
    waiting = bench.add(12, name="waiting", adapter=SMALL).sequences[0]
    bench.step()
    assert (waiting.status, waiting.block_hashes) == (Status.WAITING, [])
    bench.run()
    assert "waiting" in bench.finished


@pytest.mark.parametrize("tenants", [["t"], ["a"], ["a", "b"], ["z"], ["a", "t", "z"]])
@pytest.mark.parametrize("max_loras", [None, 1])
def test_a_request_for_a_cold_adapter_is_overtaken_by_a_bounded_number_of_others(
    memory: AdapterMemory, tenants: list[str], max_loras: int | None
) -> None:
    bench = Bench(adapters=memory, max_loras=max_loras, max_num_seqs=4)
    hot = LARGE if max_loras is None else SMALL
    cold = OTHER_SMALL
    bench.add(2, adapter=hot, tenant=tenants[0], max_tokens=5)
    bench.step()
    bench.add(2, name="cold", adapter=cold, tenant="t", max_tokens=2)
    num_steps = 0
    while "cold" not in bench.names_begun:
        for tenant in tenants:
            bench.add(2, adapter=hot, tenant=tenant, max_tokens=5)
        bench.step()
        num_steps += 1
        assert len(bench.names_begun) <= (len(tenants) + 1) * MAX_BYPASSED, "too many were admitted before it"
        assert num_steps < 400, "never admitted"


def test_short_lived_tenants_do_not_starve_a_cold_adapter_of_a_tenant_that_was_served_more(
    memory: AdapterMemory,
) -> None:
    """The other tenants leave when served and return at once: none has a backlog, but one is always waiting."""
    bench = Bench(adapters=memory, max_num_seqs=1)
    bench.add(2, tenant="b", adapter=SMALL, max_tokens=5)
    bench.add(2, name="cold", tenant="t", adapter=LARGE, max_tokens=2)
    bench.scheduler.waiting.charge("t", 200)
    for _ in range(1000):
        live = {s.request.tenant for s in [*bench.scheduler.running, *bench.scheduler.waiting]}
        for tenant in sorted({"b", "c"} - live):
            bench.add(2, tenant=tenant, adapter=SMALL, max_tokens=5)
        bench.step()
        if "cold" in bench.names_begun:
            return
    pytest.fail("never admitted")


def test_only_the_request_whose_adapter_cannot_be_loaded_fails(tmp_path: Path) -> None:
    memory = make_adapter_memory(4)
    for adapter in (SMALL, OTHER_SMALL):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    damage(tmp_path / f"{SMALL.digest}.packed")
    bench = Bench(adapters=memory)
    broken = bench.add(2, name="broken", adapter=SMALL, tenant="alone")
    bench.add(2, name="fine", adapter=OTHER_SMALL)
    plan = bench.step()
    assert [sequence for sequence, _ in plan.failed] == broken.sequences
    assert "sha256" in plan.failed[0][1]
    assert broken.sequences[0].status is Status.FINISHED
    assert rows(plan).keys() == {"fine"}
    memory.check_invariants({OTHER_SMALL.digest: 1})


def test_finishing_a_running_or_waiting_sequence_frees_everything_it_holds(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory, budget=4)
    chunked = bench.add(12, adapter=SMALL).sequences[0]
    waiting = bench.add(4, adapter=OTHER_SMALL).sequences[0]
    bench.step()
    assert (chunked.status, waiting.status) == (Status.RUNNING, Status.WAITING)
    bench.scheduler.finish(chunked)
    bench.scheduler.finish(waiting)
    assert not bench.scheduler.has_work()
    bench.scheduler.check_invariants()
    assert bench.pool.counts().referenced == 0


# ---- adapters copied to a device


@pytest.fixture
def device_memory(paths: dict[TinyAdapter, Path], monkeypatch: pytest.MonkeyPatch) -> AdapterMemory:
    """Room for all adapters, loaded from a host tier; copying SMALL takes as long as a prompt of four tokens."""
    monkeypatch.setattr(scheduler, "HIDDEN_COPY_BYTES", SMALL.size_bytes // 4)
    use_manual_threads(monkeypatch)
    memory = make_adapter_memory(6, accelerator=HostAccelerator(), host_tier_units=6)
    for adapter, path in paths.items():
        memory.add(adapter.digest, str(path))
    assert memory._transit._tier is not None
    wait(staged.filling for staged in memory._transit._tier._staged.values())
    return memory


def names(plan: StepPlan) -> set[str]:
    return {item.sequence.request.request_id for item in plan.scheduled}


def test_with_no_sequence_running_requests_start_before_their_adapters_are_copied(device_memory: AdapterMemory) -> None:
    bench = Bench(adapters=device_memory)
    bench.add(1, name="a", adapter=SMALL)
    bench.add(1, name="b", adapter=OTHER_SMALL)
    assert names(bench.step()) == {"a", "b"}


def test_beside_running_sequences_a_prompt_too_short_to_hide_its_adapters_copy_waits(
    device_memory: AdapterMemory,
) -> None:
    bench = Bench(adapters=device_memory)
    bench.add(2, name="runs")
    bench.step()
    bench.add(4, name="hides it", adapter=SMALL)
    bench.add(3, name="does not", adapter=OTHER_SMALL)
    assert names(bench.step()) == {"runs", "hides it"}
    assert names(bench.step()) == {"runs", "hides it", "does not"}, "it has arrived meanwhile"


def test_only_rows_within_the_steps_budget_hide_a_copy(device_memory: AdapterMemory) -> None:
    bench = Bench(budget=4, adapters=device_memory)
    bench.add(2, name="runs")
    bench.step()
    bench.add(5, name="next", adapter=SMALL)
    assert names(bench.step()) == {"runs"}, "three rows are left of the budget"


def test_a_prefetched_adapter_is_charged_to_the_first_tenant_that_uses_it(device_memory: AdapterMemory) -> None:
    bench = Bench(adapters=device_memory)
    device_memory.prefetch(SMALL.digest)
    for tenant in ("first", "second"):
        bench.add(3, tenant=tenant, adapter=SMALL)
    bench.step()
    assert bench.scheduler.waiting.served("first") == 3 + COLD_LOAD_TOKENS
    assert bench.scheduler.waiting.served("second") == 3


# ---- priority among the requests of one tenant


def running(bench: Bench) -> list[str]:
    return [sequence.request.request_id for sequence in bench.scheduler.running]


def test_the_most_urgent_request_of_a_tenant_is_admitted_first() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority in (("later", 7), ("1st", 0), ("2nd", 0), ("urgent", -3)):
        bench.add(4, name=name, priority=priority, max_tokens=1)
    bench.run()
    assert bench.finished == ["urgent", "1st", "2nd", "later"]


def test_the_prompts_of_a_tenant_are_computed_by_priority() -> None:
    bench = Bench(num_blocks=200, budget=16)
    bench.add(100, name="later", priority=1)
    bench.step()
    bench.add(20, name="sooner")
    assert rows(bench.step()) == {"later": 8, "sooner": 8}, "half of the rows are for the one that waits"
    assert rows(bench.step()) == {"sooner": 12, "later": 4}


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(100, 3), (7, 8)], ids=["no seat", "no blocks"])
def test_a_request_takes_the_place_of_the_newest_least_urgent_of_its_tenant(num_blocks: int, max_num_seqs: int) -> None:
    bench = Bench(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    for name, priority in (("later 1", 2), ("later 2", 2), ("sooner", 1)):
        bench.add(4, name=name, priority=priority, max_tokens=4)
    bench.step()
    bench.step()
    bench.add(5, name="urgent", max_tokens=1)
    assert rows(bench.step()) == {"later 1": 1, "sooner": 1, "urgent": 5}
    assert bench.scheduler.num_preemptions == 1
    assert rows(bench.step()) == {"later 1": 1, "sooner": 1, "later 2": 2}, "its full block was found again"
    bench.run()
    assert bench.scheduler.waiting._served == {}


def test_nothing_gives_way_to_a_request_of_another_tenant_or_one_as_urgent() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(4, name="other", tenant="other", priority=9)
    bench.add(4, name="as urgent")
    bench.step()
    bench.add(4, name="waits")
    assert rows(bench.step()) == {"other": 1, "as urgent": 1}
    assert bench.scheduler.num_preemptions == 0


def test_nothing_gives_way_if_that_would_not_be_enough() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=2)
    bench.add(20, name="urgent", priority=-2)
    bench.add(4, name="later", priority=1)
    bench.run_until(lambda: len(running(bench)) == 2 and bench.scheduler.running[0].num_uncomputed_tokens == 1)
    bench.add(40, name="large")
    bench.step()
    bench.add(4, name="two choices", n=2, priority=-2)
    bench.step()
    assert running(bench) == ["urgent", "later"]
    assert bench.scheduler.num_preemptions == 0


def test_nothing_gives_way_if_there_is_room() -> None:
    bench = Bench()
    bench.add(4, name="later", priority=1)
    bench.step()
    bench.add(4, name="urgent")
    assert rows(bench.step()) == {"later": 1, "urgent": 4}


def test_several_requests_give_way_to_one_with_several_choices() -> None:
    bench = Bench(max_num_seqs=4)
    for number in range(4):
        bench.add(4, name=str(number), priority=1)
    bench.step()
    bench.add(4, name="urgent", n=3)
    bench.step()
    assert running(bench) == ["0", "urgent", "urgent", "urgent"]


def test_a_request_takes_the_place_of_its_own_tenants_even_if_others_wait_before_it() -> None:
    bench = Bench(max_num_seqs=2)
    for name in ("later 1", "later 2"):
        bench.add(4, name=name, priority=1, max_tokens=9)
    bench.step()
    bench.add(4, name="other", tenant="other", max_tokens=1)
    bench.add(4, name="urgent", max_tokens=1)
    assert rows(bench.step()) == {"later 1": 1, "urgent": 4}
    assert rows(bench.step()) == {"later 1": 1, "other": 4}, "what became free goes to whoever is next"


def test_several_urgent_requests_take_their_places_in_consecutive_steps() -> None:
    bench = Bench(max_num_seqs=3)
    for number in range(3):
        bench.add(4, name=f"later {number}", priority=1)
    bench.step()
    for number in range(3):
        bench.add(4, name=f"urgent {number}")
    for _ in range(3):
        bench.step()
    assert running(bench) == ["urgent 0", "urgent 1", "urgent 2"]


def test_no_request_gives_way_while_its_prompt_is_computed() -> None:
    """It would have to begin again each time, as nothing of its prompt can be found before it has a token."""
    bench = Bench(max_num_seqs=1, budget=16)
    bench.add(100, name="later", priority=1, max_tokens=3)
    for number in range(40):
        if number % 6 == 0:
            bench.add(4, name=f"urgent {number}", max_tokens=1)
        bench.step()
    bench.run()
    assert bench.scheduler.num_preemptions <= 3, "at most once for each of its tokens"
    assert bench.finished.index("later") < 5


def test_recomputing_what_gave_way_is_charged_to_its_tenant() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(7, name="later", priority=1, max_tokens=3)
    bench.step()
    bench.add(4, name="urgent", max_tokens=1)
    bench.run()
    # 7 tokens, then urgent's 4; of later's 8 tokens one block is found, 4 are computed again, and then one more.
    assert bench.scheduler.num_preemptions == 1
    assert bench.charged == 7 + 1 + 4 + 4 + 1


def test_nothing_gives_way_for_memory_of_adapters(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory, max_num_seqs=2)
    bench.add(4, name="later 1", adapter=SMALL, priority=1, max_tokens=4)
    bench.add(4, name="later 2", adapter=SMALL, priority=1, max_tokens=5)
    bench.step()
    bench.add(4, name="urgent", adapter=LARGE, max_tokens=1)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.finished == ["later 1", "later 2", "urgent"]


def test_nothing_gives_way_before_an_adapter_is_there(
    paths: dict[TinyAdapter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_manual_threads(monkeypatch)
    memory = make_adapter_memory(4, accelerator=HostAccelerator())
    memory.add(SMALL.digest, str(paths[SMALL]))
    bench = Bench(adapters=memory, max_num_seqs=1)
    bench.add(4, name="later", priority=1)
    (sequence,) = queue(bench)
    bench.add(4, name="urgent", adapter=SMALL)
    served = bench.scheduler.waiting.served("t")
    plan = ahead(bench)
    assert rows(plan) == {"later": 1}
    collect(note_queued(bench, plan))
    memory.wait_for_upload()
    assert bench.scheduler.try_schedule_ahead(lambda _: False) is None
    assert sequence.num_charged_tokens == 5
    assert rows(bench.scheduler.schedule()) == {"urgent": 4}
    assert bench.scheduler.waiting.served("t") == served + 1 + 1 + 4 + COLD_LOAD_TOKENS, "loading is charged once"


def test_nothing_gives_way_if_the_blocks_it_would_free_are_the_requests_own_prefix() -> None:
    shared = list(range(40))
    bench = Bench(num_blocks=16, budget=64)
    bench.add(7, name="other", tenant="other", max_tokens=2)
    bench.add([*shared, 50], name="later", priority=1, max_tokens=3)
    bench.step()
    bench.add([*shared, *range(60, 84)], name="urgent", max_tokens=1)
    assert rows(bench.step()) == {"other": 1, "later": 1}
    assert rows(bench.step()) == {"urgent": 24}, "with the blocks of the other request"
    bench.run()


def test_choices_that_share_blocks_free_them_together() -> None:
    bench = Bench(num_blocks=8, budget=64)
    bench.add(23, name="later", n=2, priority=1, max_tokens=9)
    bench.step()
    bench.add(20, name="urgent", max_tokens=1)
    assert rows(bench.step()) == {"urgent": 20}
    assert bench.scheduler.num_preemptions == 2
    bench.run()


def test_free_room_is_left_to_another_tenant_that_waits_before() -> None:
    bench = Bench(num_blocks=200, budget=64, max_num_seqs=8)
    for number in range(2):
        bench.add(4, name=f"c{number}", tenant="c", max_tokens=8)
    for number in range(4):
        bench.add(8, name=f"later {number}", tenant="a", priority=1)
    bench.run_until(lambda: len(running(bench)) == 6)
    bench.step()
    bench.add(4, name="b", tenant="b", n=4, max_tokens=1)
    bench.add(4, name="urgent", tenant="a", n=3)
    bench.step()
    assert running(bench).count("urgent") == 3, "in the places of three"
    assert bench.scheduler.num_preemptions == 3
    bench.run_until(lambda: "b" in bench.names_begun)
    assert "c0" in bench.finished
    assert bench.scheduler.num_preemptions == 3


def test_an_urgent_request_whose_adapter_is_damaged_fails_at_once(tmp_path: Path) -> None:
    for is_ahead in (False, True):
        memory = make_adapter_memory(4)
        path = SMALL.write(tmp_path)
        memory.add(SMALL.digest, str(path))
        damage(path)
        bench = Bench(adapters=memory, max_num_seqs=1)
        bench.add(4, name="later", priority=1)
        sequences = queue(bench)
        bench.add(4, name="urgent", adapter=SMALL)
        if not is_ahead:
            collect(sequences)
        plan = ahead(bench) if is_ahead else bench.scheduler.schedule()
        assert [sequence.request.request_id for sequence, _ in plan.failed] == ["urgent"]
        assert rows(plan) == {"later": 1}


@pytest.mark.parametrize("num_prompt", [4, 17, 33])
def test_a_request_gets_a_token_between_two_times_that_it_gives_way(num_prompt: int) -> None:
    bench = Bench(num_blocks=200, max_num_seqs=1, budget=16)
    bench.add(num_prompt, name="later", priority=1, max_tokens=5)
    for number in range(60):
        if number % 2 == 0:
            bench.add(4, name=f"urgent {number}", max_tokens=1)
        bench.step()
    assert "later" in bench.finished
    assert bench.scheduler.num_preemptions <= 5


def test_an_urgent_request_overtakes_one_whose_adapter_does_not_fit_but_not_forever(memory: AdapterMemory) -> None:
    bench = Bench(num_blocks=1000, adapters=memory, max_num_seqs=2)
    bench.add(4, name="pins", tenant="other", adapter=SMALL, max_tokens=3 * MAX_BYPASSED)
    bench.add(4, name="later", adapter=SMALL, priority=9, max_tokens=1000)
    bench.step()
    bench.add(4, name="does not fit", adapter=LARGE, max_tokens=1)
    for number in range(2 * MAX_BYPASSED):
        bench.add(4, name=str(number), adapter=SMALL, max_tokens=1)
        bench.step()
    assert bench.scheduler.num_preemptions > 0
    assert len(bench.names_begun) == 2 + MAX_BYPASSED
    bench.run_until(lambda: "does not fit" in bench.finished)


def test_no_more_than_max_bypassed_take_places_before_a_request_whose_adapter_does_not_fit(
    memory: AdapterMemory,
) -> None:
    num_later = MAX_BYPASSED + 9
    bench = Bench(num_blocks=1000, budget=400, adapters=memory, max_num_seqs=num_later)
    for _ in range(num_later):
        bench.add(4, adapter=SMALL, priority=1)
    bench.step()
    bench.add(4, name="does not fit", adapter=LARGE)
    for _ in range(num_later):
        bench.add(4, adapter=SMALL)
    for _ in range(num_later):
        bench.step()
    assert bench.scheduler.num_preemptions == MAX_BYPASSED


def test_a_request_takes_its_place_as_soon_as_a_less_urgent_one_has_a_token() -> None:
    for is_ahead in (False, True):
        bench = Bench(max_num_seqs=1, budget=16)
        bench.add(40, name="later", priority=1)
        queue(bench)
        bench.add(4, name="urgent")
        if is_ahead:
            assert rows(ahead_and_note(bench)) == {"later": 16}
            assert rows(ahead_and_note(bench)) == {"later": 8}
            assert bench.scheduler.try_schedule_ahead(lambda _: False) is None
        else:
            assert [rows(bench.step()) for _ in range(3)] == [{"later": 16}, {"later": 8}, {"urgent": 4}]


def test_choosing_who_gives_way_takes_time_in_proportion_to_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_blocks=130, budget=1000, max_num_seqs=100)
    for _ in range(32):
        bench.add(15, priority=1)
    bench.step()
    bench.add(600, name="too large")
    num_asked = 0
    num_references = bench.pool.num_references

    def count(block: int) -> int:
        nonlocal num_asked
        num_asked += 1
        return num_references(block)

    monkeypatch.setattr(bench.pool, "num_references", count)
    bench.scheduler.schedule()
    assert num_asked <= 130


def test_the_first_to_be_preempted_is_the_least_urgent_of_the_most_served_tenant() -> None:
    bench = Bench(num_blocks=3, budget=16)
    for name, priority in (("1", 0), ("2", 1), ("3", 0)):
        bench.add(3, name=name, priority=priority, max_tokens=8)
    for _ in range(3):
        bench.step()
    assert "2" not in running(bench)
    assert "1" in running(bench)


def test_steps_are_not_scheduled_ahead_of_one_in_which_a_sequence_gives_way() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(4, name="later", priority=1)
    sequences = queue(bench)
    bench.add(4, name="urgent")
    assert bench.scheduler.try_schedule_ahead(lambda _: False) is None
    collect(sequences)
    assert rows(bench.step()) == {"urgent": 4}


# ---- steps scheduled ahead, while tokens are unknown


def queue(bench: Bench) -> list[Sequence]:
    """Schedule a step whose tokens are still being chosen; returns the sequences that get them."""
    return note_queued(bench, bench.scheduler.schedule())


def note_queued(bench: Bench, plan: StepPlan) -> list[Sequence]:
    sequences = []
    for item in plan.scheduled:
        item.sequence.num_computed_tokens += item.num_rows
        if item.sequence.num_uncomputed_tokens <= 0:
            state = item.sequence.state
            sequences += [item.sequence] if state.is_forked else bench.scheduler.fork(item.sequence)
    return sequences


def collect(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        sequence.token_ids.append(0)


def ahead(bench: Bench, ends: Callable[[Sequence], bool] = lambda _: False) -> StepPlan:
    plan = bench.scheduler.try_schedule_ahead(ends)
    assert plan is not None
    assert sum(item.num_rows for item in plan.scheduled) <= bench.budget
    bench.scheduler.check_invariants()
    return plan


def ahead_and_note(bench: Bench) -> StepPlan:
    plan = ahead(bench)
    note_queued(bench, plan)
    return plan


def test_a_step_ahead_has_one_row_for_each_sequence_that_does_not_end(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory)
    for name, adapter in (("other", OTHER_SMALL), ("small", SMALL), ("ends", None), ("base", None)):
        bench.add(4, name=name, adapter=adapter)
    sequences = {sequence.request.request_id: sequence for sequence in queue(bench)}
    served = bench.scheduler.waiting.served("t")
    plan = ahead(bench, lambda sequence: sequence is sequences["ends"])
    assert [item.sequence for item in plan.scheduled] == [sequences[name] for name in ("base", "other", "small")]
    assert {(item.num_rows, item.num_sampled_rows) for item in plan.scheduled} == {(1, 1)}
    assert {name: len(sequence.blocks) for name, sequence in sequences.items()} == {
        "other": 2,
        "small": 2,
        "ends": 1,
        "base": 2,
    }
    assert bench.scheduler.waiting.served("t") == served + 3


def test_a_prompt_continues_ahead_beside_sequences_whose_tokens_are_unknown() -> None:
    bench = Bench(budget=16)
    bench.add(4, name="decodes")
    bench.add(40, name="prompt")
    queue(bench)
    plan = ahead(bench)
    assert rows(plan) == {"decodes": 1, "prompt": 15}
    assert {item.sequence.request.request_id: item.num_sampled_rows for item in plan.scheduled} == {
        "decodes": 1,
        "prompt": 0,
    }
    collect(note_queued(bench, plan))
    plan = ahead(bench)
    assert rows(plan) == {"decodes": 1, "prompt": 40 - 12 - 15}
    assert all(item.num_sampled_rows == 1 for item in plan.scheduled)


def test_a_new_request_is_admitted_ahead() -> None:
    bench = Bench()
    bench.add(4, name="decodes")
    queue(bench)
    bench.add(6, name="comes")
    assert rows(ahead(bench)) == {"decodes": 1, "comes": 6}


def test_every_writer_of_a_shared_block_except_the_last_copies_it_ahead() -> None:
    bench = Bench()
    bench.add(3, n=2)
    first, second = queue(bench)
    shared = first.blocks[-1]
    assert second.blocks[-1] == shared
    plan = ahead(bench)
    ((source, copy),) = plan.block_copies
    assert source == shared
    assert {first.blocks[-1], second.blocks[-1]} == {shared, copy}


def test_a_step_ahead_leaves_sequences_beyond_the_budget_for_the_next_step() -> None:
    bench = Bench(budget=4)
    bench.add(4, n=5)
    queue(bench)
    assert [item.num_rows for item in ahead(bench).scheduled] == [1, 1, 1, 1]


def without_a_block_for_a_row(bench: Bench) -> None:
    bench.add(12)
    bench.add(4)
    queue(bench)


def without_blocks_for_a_chunk(bench: Bench) -> None:
    bench.add(16)
    bench.scheduler._max_num_batched_tokens = 8
    queue(bench)
    bench.pool.try_allocate(bench.pool.num_available)


@pytest.mark.parametrize("prepare", [without_a_block_for_a_row, without_blocks_for_a_chunk])
def test_nothing_is_scheduled_ahead_if_a_sequence_might_have_to_be_preempted(prepare: Callable[[Bench], None]) -> None:
    bench = Bench(num_blocks=4)
    prepare(bench)
    before = bench.pool.counts(), bench.scheduler.waiting.served("t")
    assert bench.scheduler.try_schedule_ahead(lambda _: False) is None
    assert (bench.pool.counts(), bench.scheduler.waiting.served("t")) == before


def test_a_failure_is_told_even_if_nothing_is_scheduled_ahead(tmp_path: Path) -> None:
    memory = make_adapter_memory(4)
    path = SMALL.write(tmp_path)
    memory.add(SMALL.digest, str(path))
    damage(path)
    bench = Bench(num_blocks=4, adapters=memory, max_num_seqs=2)
    bench.add(12, priority=1)
    bench.add(4, priority=1)
    queue(bench)
    bench.add(4, name="urgent", adapter=SMALL)
    plan = ahead(bench)
    assert [sequence.request.request_id for sequence, _ in plan.failed] == ["urgent"]
    assert plan.scheduled == []
    assert bench.scheduler.try_schedule_ahead(lambda _: False) is None


def test_a_step_ahead_is_empty_if_all_sequences_end() -> None:
    bench = Bench()
    bench.add(4)
    queue(bench)
    assert ahead(bench, lambda _: True).scheduled == []


def test_a_prompt_whose_first_output_token_is_its_last_is_still_computed_ahead() -> None:
    bench = Bench(budget=16)
    bench.add(20, name="prompt")
    bench.scheduler.schedule().scheduled[0].sequence.num_computed_tokens += 16
    assert rows(ahead(bench, lambda _: True)) == {"prompt": 4}


def full_bench() -> tuple[Bench, Sequence]:
    """A bench where one request waits for the only seat, and the sequence that has the seat."""
    bench = Bench(max_num_seqs=1)
    bench.add(4, name="sits")
    bench.add(4, name="waits")
    (sequence,) = queue(bench)
    return bench, sequence


def test_steps_ahead_retry_waiting_requests_after_max_closed_steps() -> None:
    bench, _ = full_bench()
    bench.scheduler._max_num_seqs = 2  # behind the scheduler's back
    num_ahead = 0
    while rows(plan := ahead(bench)) == {"sits": 1}:
        num_ahead += 1
        collect(note_queued(bench, plan))
    assert rows(plan) == {"sits": 1, "waits": 4}
    assert num_ahead == MAX_CLOSED_STEPS


def test_steps_not_scheduled_ahead_retry_waiting_requests_after_max_closed_steps() -> None:
    bench, _ = full_bench()
    bench.scheduler._max_num_seqs = bench.max_num_seqs = 2
    collect(bench.scheduler.running)
    num_steps = 0
    while rows(plan := bench.step()) == {"sits": 1}:
        num_steps += 1
    assert rows(plan) == {"sits": 1, "waits": 4}
    assert num_steps == MAX_CLOSED_STEPS


def test_a_sequence_about_to_end_gives_its_seat_to_a_waiting_request() -> None:
    bench, _ = full_bench()
    assert rows(ahead(bench, lambda _: True)) == {"waits": 4}
    bench = Bench(max_num_seqs=2)
    for name in ("ends", "goes on", "waits"):
        bench.add(4, name=name)
    ends, _ = queue(bench)
    assert rows(ahead(bench, lambda sequence: sequence is ends)) == {"goes on": 1, "waits": 4}


def test_waiting_requests_are_retried_at_once_after_a_sequence_finishes_or_a_request_arrives() -> None:
    bench, sequence = full_bench()
    bench.scheduler.finish(sequence)
    assert rows(ahead(bench)) == {"waits": 4}
    bench, _ = full_bench()
    bench.scheduler._max_num_seqs = 2
    bench.add(4, name="comes")
    assert rows(ahead(bench)) == {"sits": 1, "waits": 4}


def test_a_request_waiting_for_adapter_memory_is_admitted_once_the_memory_is_released(memory: AdapterMemory) -> None:
    bench = Bench(adapters=memory)
    bench.add(4, name="sits", adapter=SMALL)
    bench.add(4, name="waits", adapter=LARGE)
    (sequence,) = queue(bench)
    assert rows(ahead(bench)) == {"sits": 1}
    bench.scheduler.finish(sequence)
    assert rows(bench.scheduler.schedule()) == {"waits": 4}


def test_scheduling_ahead_does_not_evict_an_adapter_of_the_queued_step(memory: AdapterMemory) -> None:
    """Not even if no sequence continues with it."""
    bench = Bench(adapters=memory)
    bench.add(4, name="ends", adapter=SMALL)
    bench.add(4, name="waits", adapter=LARGE)
    queue(bench)
    assert ahead(bench, lambda _: True).scheduled == []
    assert memory.is_resident(SMALL.digest)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_any_number_of_requests_pass_one_whose_adapter_is_being_read(
    on_a_gpu: bool, paths: dict[TinyAdapter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_manual_threads(monkeypatch)
    memory = make_adapter_memory(4, accelerator=HostAccelerator() if on_a_gpu else None, background_bytes=0)
    memory.add(SMALL.digest, str(paths[SMALL]))
    bench = Bench(adapters=memory)
    bench.add(4, name="waits", adapter=SMALL)
    for number in range(2 * MAX_BYPASSED):
        bench.add(4, name=f"passes {number}", tenant="other", max_tokens=1)
        assert names(bench.step()) == {f"passes {number}"}
    memory.wait_for_upload()
    bench.add(4, name="last", tenant="other", max_tokens=1)
    assert "waits" in names(bench.step())


def test_a_request_waiting_for_an_adapter_is_retried_as_soon_as_the_adapter_is_uploaded(
    paths: dict[TinyAdapter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_manual_threads(monkeypatch)
    memory = make_adapter_memory(4, accelerator=HostAccelerator())
    memory.add(SMALL.digest, str(paths[SMALL]))
    bench = Bench(adapters=memory)
    bench.add(4, name="sits")
    bench.add(4, name="waits", adapter=SMALL)
    (sequence,) = queue(bench)
    plan = ahead(bench)
    assert rows(plan) == {"sits": 1}
    collect(note_queued(bench, plan))
    memory.wait_for_upload()
    assert rows(ahead(bench)) == {"sits": 1, "waits": 4}
    assert sequence.num_uncomputed_tokens == 0


def test_scheduling_ahead_fails_only_the_request_whose_adapter_cannot_be_loaded(tmp_path: Path) -> None:
    memory = make_adapter_memory(4)
    path = SMALL.write(tmp_path)
    memory.add(SMALL.digest, str(path))
    damage(path)
    bench = Bench(adapters=memory)
    bench.add(4, name="decodes")
    queue(bench)
    bench.add(4, name="fails", adapter=SMALL)
    plan = ahead(bench)
    assert rows(plan) == {"decodes": 1}
    assert [sequence.request.request_id for sequence, _ in plan.failed] == ["fails"]


# ---- any workload

workload = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.integers(1, 12),
        st.sampled_from([1, 1, 2, 3]),
        st.sampled_from("abc"),
        st.sampled_from([None, SMALL, OTHER_SMALL, LARGE]),
        st.sampled_from([0, 0, 5, -1]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    workload=workload, num_blocks=st.integers(8, 14), budget=st.integers(3, 12), max_loras=st.sampled_from([None, 1])
)
def test_every_workload_ends_and_each_token_is_charged_once(
    paths: dict[TinyAdapter, Path],
    workload: list[tuple[int, int, int, str, TinyAdapter | None, int, int]],
    num_blocks: int,
    budget: int,
    max_loras: int | None,
) -> None:
    memory = make_adapter_memory(4)
    for adapter, path in paths.items():
        memory.add(adapter.digest, str(path))
    bench = Bench(num_blocks=num_blocks, budget=budget, max_num_seqs=4, max_loras=max_loras, adapters=memory)
    num_computed = 0
    for num_prompt, max_tokens, n, tenant, adapter, priority, num_steps in workload:
        bench.add(num_prompt, max_tokens=max_tokens, n=n, tenant=tenant, adapter=adapter, priority=priority)
        num_computed += num_prompt + n * (max_tokens - 1)
        for _ in range(num_steps):
            bench.step()
    bench.run()
    assert len(bench.finished) == sum(n for _, _, n, _, _, _, _ in workload)
    if any(priority != 0 for _, _, _, _, _, priority, _ in workload):
        assert bench.charged >= num_computed + COLD_LOAD_TOKENS * memory.num_loads, "giving way is charged"
    else:
        assert bench.charged == num_computed + COLD_LOAD_TOKENS * memory.num_loads
    assert bench.scheduler.waiting._served == {}
    memory.check_invariants({})
