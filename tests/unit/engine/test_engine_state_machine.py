"""Everything tenants, operators and bad luck can do to the engine, in any order, with a hash as the model."""

import os
import shutil
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraserve.engine.engine import NOT_FINITE_MESSAGE
from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import (
    EngineErrorCode,
    EngineRequest,
    FinishReason,
    Grammar,
    Pooling,
    PoolingParams,
    ReasoningLimit,
    ReasoningTokens,
    SamplingParams,
    SequenceOutput,
)
from tests.support.delayed_accelerator import DelayedAccelerator
from tests.support.hash_grammars import behind, hash_grammars, one_of
from tests.support.hash_model import BASE, EOS, Choice, expected_choice, make_hash_engine
from tests.support.packed_adapters import TinyAdapter, damage, make_adapter_memory

ADAPTERS = [TinyAdapter(value, num_units) for value, num_units in enumerate((1, 2, 3, 4), start=1)]
ARENA_UNITS = 6
MAX_NUM_SEQS = 5
MAX_NUM_BATCHED_TOKENS = 10
MAX_LORAS = 2
MAX_STEPS = 3000

PROMPTS = [
    [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21],
    [1, 2, 3, 4, 5, 6, 8, 9, 20, 19] * 2,
]
"""Prompts are prefixes of these, so that they share blocks."""

BEGUN, MAY_OPEN = ReasoningTokens(None, 3), ReasoningTokens(20, 3)
GRAMMARS = [one_of("abc", "abd", "b", "bcde", "bcdefg"), one_of("i0i1i2i3k", "i0i1j"), one_of("uvwxyz")]
GRAMMARS += [behind(BEGUN, one_of("abc", "abd")), behind(MAY_OPEN, one_of("b", "bcde", "bcdefg"))]
CONSTRAINTS: list[tuple[Grammar | None, ReasoningLimit | None]] = [
    *((grammar, None) for grammar in (*[None] * 6, *GRAMMARS)),
    *((grammar, ReasoningLimit(BEGUN, 2)) for grammar in (None, GRAMMARS[-2])),
    *((grammar, ReasoningLimit(MAY_OPEN, 1)) for grammar in (None, GRAMMARS[-1])),
]
"""A grammar, and a limit of the reasoning."""

TENANTS = ["red", "blue", "green"]


@dataclass
class Ask:
    prompt: list[int]
    params: SamplingParams
    adapter: TinyAdapter | None
    tenant: str
    has_own_salt: bool
    pooling: PoolingParams | None = None
    priority: int = 0


POOLINGS = [PoolingParams(Pooling.LAST), PoolingParams(Pooling.MEAN, dimensions=5), PoolingParams(Pooling.MEAN)]
POOLINGS += [PoolingParams(Pooling.LAST, normalize=False)]

asks = st.builds(
    Ask,
    prompt=st.builds(lambda prompt, length: prompt[:length], st.sampled_from(PROMPTS), st.integers(1, 20)),
    params=st.builds(
        lambda constraint, min_tokens, **others: SamplingParams(
            grammar=constraint[0],
            reasoning_limit=constraint[1],
            min_tokens=0 if constraint[1] else min_tokens,  # below it, a stop token may not end the reasoning
            **others,
        ),
        constraint=st.sampled_from(CONSTRAINTS),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 3),
        stop_token_ids=st.sampled_from([(), (3,), (3, 11)]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 2),
        logprobs=st.sampled_from([None, 1]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    ),
    adapter=st.sampled_from([None, *ADAPTERS]),
    tenant=st.sampled_from(TENANTS),
    has_own_salt=st.booleans(),
    pooling=st.sampled_from([*[None] * 12, *POOLINGS]),
    priority=st.sampled_from([0, 0, 1, 2]),
)
recency = st.integers(0, 5)


def random_ask(random: Random) -> Ask:
    """Long enough that such requests use up the blocks."""
    grammar, limit = random.choice(CONSTRAINTS)
    params = SamplingParams(
        max_tokens=random.randint(1, 20),
        n=random.choice([1, 1, 2, 3]),
        temperature=random.choice([0.0, 1.0]),
        repetition_penalty=random.choice([1.0, 1.3]),
        seed=random.randint(0, 3),
        stop_token_ids=random.choice([(), (3,)]),
        ignore_eos=random.random() < 0.8,
        logprobs=random.choice([None, 1]),
        prompt_logprobs=random.choice([None, None, 1]),
        grammar=grammar,
        reasoning_limit=limit,
    )
    prompt = random.choice(PROMPTS)[: random.randint(1, 20)]
    adapter, tenant, has_own_salt = random.choice([None, *ADAPTERS]), random.choice(TENANTS), random.random() < 0.5
    return Ask(prompt, params, adapter, tenant, has_own_salt, priority=random.choice([0, 0, 1, 2]))


@dataclass
class Ledger:
    """A request and its outputs so far."""

    request: EngineRequest
    adapter: TinyAdapter | None
    choices: list[Choice]
    is_aborted: bool = False
    was_damaged: bool = False
    """The adapter's file was damaged while the request was live."""

    @property
    def is_live(self) -> bool:
        return any(choice.finish_reason is None for choice in self.choices)


@dataclass
class Unload:
    """A call of unload_adapter that is not yet acknowledged."""

    digest: str
    requests: list[Ledger] = field(default_factory=list)
    """The adapter's requests that were live at the call."""


class EngineMachine(RuleBasedStateMachine):
    packed: dict[str, Path]
    folder: Path
    has_device = False
    host_tier_units: int | None = None
    """None = adapters are loaded at once; otherwise they are loaded while steps run."""
    num_speculative_tokens = 0
    num_state_slots = 0
    max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS

    def __init__(self) -> None:
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()
        self.paths = {a.digest: Path(shutil.copy(self.packed[a.digest], self.folder)) for a in ADAPTERS}
        accelerator = DelayedAccelerator() if self.has_device else None
        self.memory = make_adapter_memory(
            ARENA_UNITS, 3, accelerator if self.host_tier_units is not None else None, self.host_tier_units or 0
        )
        self.engine, self.runner = make_hash_engine(
            self.monkeypatch,
            adapters=self.memory,
            num_blocks=12,
            block_size=4,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_loras=MAX_LORAS,
            num_speculative_tokens=self.num_speculative_tokens,
            num_state_slots=self.num_state_slots,
            accelerator=accelerator,
        )
        self.scheduler = self.engine._scheduler
        for grammar, tenant in product(GRAMMARS, TENANTS):
            hash_grammars().compile(grammar, tenant).result()  # so that no step does nothing but wait
        self.ledger: dict[str, Ledger] = {}
        self.expected: dict[tuple[str, int], Choice] = {}
        """Computed on demand, once each: this takes longer than a step."""
        self.usable: set[TinyAdapter] = set()
        self.damaged: set[TinyAdapter] = set()
        self.pending: dict[str, Unload] = {}

    @initialize()
    def load_some(self) -> None:
        for adapter in ADAPTERS[:3]:
            self.load(adapter)

    # ---- requests

    @rule(asked=st.lists(asks, min_size=1, max_size=5))
    def submit(self, asked: list[Ask]) -> None:
        for ask in asked:
            self._submit(ask)

    def _submit(self, ask: Ask) -> None:
        adapter, params = ask.adapter, ask.params
        if ask.pooling is not None:
            params = replace(params, n=1, grammar=None)
        request = EngineRequest(
            request_id=f"request {len(self.ledger)}",
            prompt_token_ids=ask.prompt,
            sampling=params,
            adapter_digest=None if adapter is None else adapter.digest,
            cache_salt=ask.tenant if ask.has_own_salt else "",
            tenant=ask.tenant,
            pooling=ask.pooling,
            priority=ask.priority,
        )
        if adapter is not None and adapter not in self.usable:
            with pytest.raises(EngineRequestError, match="is not loaded"):
                self.engine.add_request(request)
            return
        self.engine.add_request(request)
        ledger = Ledger(request, adapter, [Choice() for _ in range(params.n)])
        ledger.was_damaged = adapter in self.damaged
        self.ledger[request.request_id] = ledger

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        had_work = self.engine.has_work()
        num_steps = self.engine._counts.num_steps
        outputs = self.engine.step()
        if had_work:
            did_something = outputs or self.engine._counts.num_steps > num_steps
            may_wait = self.host_tier_units is not None or self.engine._compiling
            assert did_something or may_wait, "a step with work to do did nothing"
            assert max(self.engine.stats().recent_step_tokens, default=0) <= self.max_num_batched_tokens
            assert all(len(batch - {None}) <= MAX_LORAS for batch in self.runner.batch_adapters[-1:])
        self._take(outputs)

    @precondition(lambda self: self.ledger)
    @rule(recency=recency, twice=st.booleans())
    def abort(self, recency: int, twice: bool) -> None:
        ledger = self._recent(recency)
        live = [i for i, choice in enumerate(ledger.choices) if choice.finish_reason is None]
        ledger.is_aborted = ledger.is_aborted or ledger.is_live
        outputs = self.engine.abort(ledger.request.request_id)
        assert [(output.index, output.finish_reason) for output in outputs] == [(i, FinishReason.ABORT) for i in live]
        self._take(outputs)
        if twice:
            assert self.engine.abort(ledger.request.request_id) == []
            assert self.engine.abort("no such request") == []
        holders = {sequence.request.request_id for sequence in [*self.scheduler.running, *self.scheduler.waiting]}
        assert ledger.request.request_id not in holders

    @precondition(lambda self: self.ledger)
    @rule(recency=recency, index=st.integers(0, 3))
    def abort_choice(self, recency: int, index: int) -> None:
        ledger = self._recent(recency)
        is_live = index < len(ledger.choices) and ledger.choices[index].finish_reason is None
        ledger.is_aborted = ledger.is_aborted or is_live
        outputs = self.engine.abort(ledger.request.request_id, index)
        expected = [(index, FinishReason.ABORT)] if is_live else []
        assert [(output.index, output.finish_reason) for output in outputs] == expected
        self._take(outputs)
        assert self.engine.abort(ledger.request.request_id, index) == []

    def _recent(self, recency: int) -> Ledger:
        """0 = the newest."""
        return list(self.ledger.values())[-1 - recency % len(self.ledger)]

    @precondition(lambda self: self.ledger)
    @rule(recency=recency)
    def submit_an_id_in_use(self, recency: int) -> None:
        ledger = self._recent(recency)
        if ledger.is_live:
            with pytest.raises(EngineRequestError, match="is in use"):
                self.engine.add_request(ledger.request)

    @rule(place=st.integers(0, 4))
    def poison_next(self, place: int) -> None:
        self.runner.poison_next = place

    # ---- adapters

    @rule(adapter=st.sampled_from(ADAPTERS))
    def load(self, adapter: TinyAdapter) -> None:
        self.engine.load_adapter(adapter.digest, str(self.paths[adapter.digest]))
        self.usable.add(adapter)
        self.pending.pop(adapter.digest, None)  # the load cancels the unload, which is not acknowledged

    @rule(adapter=st.sampled_from(ADAPTERS))
    def unload(self, adapter: TinyAdapter) -> None:
        self.engine.unload_adapter(adapter.digest)
        self.usable.discard(adapter)
        if adapter.digest not in self.pending:
            users = [ledger for ledger in self.ledger.values() if ledger.adapter == adapter and ledger.is_live]
            self.pending[adapter.digest] = Unload(adapter.digest, users)
        self._take([])

    @rule(adapter=st.sampled_from(ADAPTERS))
    def damage_file(self, adapter: TinyAdapter) -> None:
        if adapter not in self.damaged:
            damage(self.paths[adapter.digest])
            self.damaged.add(adapter)
            for ledger in self.ledger.values():
                ledger.was_damaged = ledger.was_damaged or (ledger.adapter == adapter and ledger.is_live)

    @precondition(lambda self: self.damaged)
    @rule()
    def repair_files(self) -> None:
        for adapter in self.damaged:
            shutil.copy(self.packed[adapter.digest], self.folder)
        self.damaged = set()

    # ---- checks

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            ledger = self.ledger[output.request_id]
            ledger.choices[output.index].take(output)
            if output.finish_reason is not None:
                self._check(ledger, output.index)
        for digest in self.engine.take_unloaded():
            unload = self.pending.pop(digest)
            assert not any(ledger.is_live for ledger in unload.requests), "acknowledged while a request uses it"
            assert not self.memory.knows(digest)

    def _expected(self, ledger: Ledger, index: int) -> Choice:
        key = ledger.request.request_id, index
        if key not in self.expected:
            value = BASE if ledger.adapter is None else ledger.adapter.value
            self.expected[key] = expected_choice(ledger.request, index, value)
        return self.expected[key]

    def _check(self, ledger: Ledger, index: int) -> None:
        choice, expected = ledger.choices[index], self._expected(ledger, index)
        if choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert choice == expected
            return
        assert choice.token_ids == expected.token_ids[: len(choice.token_ids)]
        assert choice.logprobs == expected.logprobs[: len(choice.logprobs)]
        if choice.finish_reason is FinishReason.ABORT:
            assert ledger.is_aborted
        elif choice.error == NOT_FINITE_MESSAGE:
            assert ledger.request.request_id in self.runner.poisoned, "failed for a neighbour's values"
        else:
            assert choice.error_code is EngineErrorCode.ADAPTER_UNREADABLE, choice.error
            assert ledger.was_damaged, "failed though its adapter's file was whole"

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        self.engine.check_invariants()
        running = self.scheduler.running
        assert len(running) <= MAX_NUM_SEQS
        assert len({sequence.request.adapter_digest for sequence in running} - {None}) <= MAX_LORAS
        live = {request_id for request_id, ledger in self.ledger.items() if ledger.is_live}
        assert set(self.engine._states) == live
        waiting = [*self.scheduler.waiting, *(state.sequences[0] for state in self.engine._compiling)]
        assert {sequence.request.request_id for sequence in [*running, *waiting]} == live
        assert all(not sequence.blocks and sequence.adapter_slot == -1 for sequence in waiting)

    @invariant()
    def an_adapter_is_counted_once_for_each_request_that_uses_it(self) -> None:
        counts: dict[str, int] = {}
        for ledger in self.ledger.values():
            if ledger.adapter is not None and ledger.is_live:
                counts[ledger.adapter.digest] = counts.get(ledger.adapter.digest, 0) + 1
        assert self.engine._users.num_requests == counts
        assert set(self.pending) == self.engine._users.unloading
        assert set(self.pending) <= set(counts), "an unload nobody stands in the way of is pending"

    @invariant()
    def values_that_are_not_finite_are_never_found(self) -> None:
        findable = set(self.engine._pool._block_of.values())
        assert not findable & self.runner.non_finite_blocks()

    def teardown(self) -> None:
        self.monkeypatch.undo()
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                break
            self._step()
        assert not self.engine.has_work(), "requests never finish"
        assert not any(ledger.is_live for ledger in self.ledger.values())
        assert self.engine._states == {}
        assert self.engine._users.num_requests == {}
        assert self.pending == {}
        assert self.engine._pool.counts().referenced == 0
        assert self.scheduler.waiting._served == {}
        self.memory.check_invariants({})


class DeviceMachine(EngineMachine):
    """With a device that samples most requests' tokens and lags behind the host."""

    has_device = True

    def _submit(self, ask: Ask) -> None:
        if len(self.ledger) % 8:
            params = replace(ask.params, repetition_penalty=1.0, logprobs=None, prompt_logprobs=None)
            ask = replace(ask, params=params)
        super()._submit(ask)


class ColdMachine(DeviceMachine):
    """Adapters are loaded through a host tier that has room for only some of them.

    Not for Hypothesis: the number of steps that loading an adapter takes depends on threads.
    """

    host_tier_units = 7

    def __init__(self) -> None:
        super().__init__()
        self.memory.table.arena.zero_()
        self.num_writes = 0

    def damage_file(self, adapter: TinyAdapter) -> None:
        self._wait_for_readers()
        super().damage_file(adapter)
        self._touch(adapter)

    def repair_files(self) -> None:
        self._wait_for_readers()
        damaged = list(self.damaged)
        super().repair_files()
        for adapter in damaged:
            self._touch(adapter)

    def _wait_for_readers(self) -> None:
        """Files are overwritten in place here; existing mappings would lose their pages."""
        transit = self.memory._transit
        assert transit is not None
        wait([loading.queued for loading in transit._loading.values()])
        if transit._tier is not None:
            wait([found.filling for found in transit._tier._staged.values() if found.filling is not None])

    def _touch(self, adapter: TinyAdapter) -> None:
        """Set a new time: two writes within one tick of the file system's clock would have the same one."""
        self.num_writes += 1
        os.utime(self.paths[adapter.digest], ns=(0, self.num_writes))


class TierlessMachine(ColdMachine):
    host_tier_units = 0


class DraftingMachine(EngineMachine):
    """Drafts the next tokens of sequences, correctly more often than not."""

    num_speculative_tokens = 3

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(0)
        self.monkeypatch.setattr(
            "loraserve.engine.scheduling.drafter.Draft",
            lambda *_: SimpleNamespace(next=self._draft, note_computed=lambda *_: None),
        )

    def _draft(self, token_ids: list[int], _max_length: int, max_length: int) -> tuple[list[int], bool]:
        """From the expected output of a request with the same tokens so far, with a wrong token now and then."""
        if max_length <= 0:
            return [], False
        for ledger in self.ledger.values():
            for index in range(ledger.request.sampling.n):
                answer = ledger.request.prompt_token_ids + self._expected(ledger, index).token_ids
                if answer[: len(token_ids)] == token_ids and len(answer) > len(token_ids):
                    draft = answer[len(token_ids) :][: self.random.randint(1, max_length)]
                    if self.random.random() < 0.3:
                        draft[self.random.randrange(len(draft))] = self.random.randrange(1, 20)
                    return draft, True
        return [], False


@pytest.fixture(autouse=True)
def _packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "used").mkdir()
    packed = {adapter.digest: adapter.write(tmp_path / "source") for adapter in ADAPTERS}
    monkeypatch.setattr(EngineMachine, "packed", packed, raising=False)
    monkeypatch.setattr(EngineMachine, "folder", tmp_path / "used", raising=False)


class TestEngineMachine(EngineMachine.TestCase):  # type: ignore[name-defined]
    settings = settings(derandomize=True, deadline=None, max_examples=100, stateful_step_count=40)


class NarrowDraftingMachine(DraftingMachine):
    """Prompts and recomputed tokens get one or two rows per step, beside sequences that generate."""

    max_num_batched_tokens = 3


class RecurrentMachine(EngineMachine):
    """With a recurrent state for each sequence, and a few slots for saved ones."""

    num_state_slots = MAX_NUM_SEQS + 3

    def __init__(self) -> None:
        super().__init__()
        self.monkeypatch.setattr("loraserve.engine.scheduling.sequence_states.UNCERTAIN_TOKENS", 2)
        self.monkeypatch.setattr("loraserve.engine.scheduling.sequence_states.MIN_SHARED_TOKENS", 4)


class TightRecurrentMachine(RecurrentMachine):
    """Saved states give way to sequences all the time."""

    num_state_slots = MAX_NUM_SEQS


MACHINES = [EngineMachine, DraftingMachine, NarrowDraftingMachine, DeviceMachine, ColdMachine, TierlessMachine]
MACHINES += [RecurrentMachine, TightRecurrentMachine]


class TestDraftingMachine(DraftingMachine.TestCase):  # type: ignore[name-defined]
    settings = TestEngineMachine.settings


class TestDeviceMachine(DeviceMachine.TestCase):  # type: ignore[name-defined]
    settings = TestEngineMachine.settings


class TestRecurrentMachine(RecurrentMachine.TestCase):  # type: ignore[name-defined]
    settings = TestEngineMachine.settings


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("machine_type", MACHINES)
def test_survives_a_long_random_sequence_of_actions(machine_type: type[EngineMachine], seed: int) -> None:
    """Random rules of the machine, mostly requests and steps, for longer than Hypothesis runs."""
    random, of_pooling = Random(seed), Random(f"pooling {seed}")
    machine = machine_type()
    machine.load_some()
    for _ in range(120):
        action = random.choices(
            ["submit", "step", "abort", "abort choice", "poison", "load", "unload", "damage", "repair"],
            [30, 60, 6, 6, 3, 6, 3, 2, 3],
        )[0]
        match action:
            case "submit":
                machine._submit(random_ask(random))
                if of_pooling.random() < 0.2:
                    machine._submit(replace(random_ask(of_pooling), pooling=of_pooling.choice(POOLINGS)))
            case "step":
                machine.step(random.randint(1, 6))
            case "abort" if machine.ledger:
                machine.abort(random.randint(0, 5), random.random() < 0.5)
            case "abort choice" if machine.ledger:
                machine.abort_choice(random.randint(0, 5), random.randint(0, 3))
            case "poison":
                machine.poison_next(random.randint(0, 4))
            case "load":
                machine.load(random.choice(ADAPTERS))
            case "unload":
                machine.unload(random.choice(ADAPTERS))
            case "damage":
                machine.damage_file(random.choice(ADAPTERS))
            case "repair" if machine.damaged:
                machine.repair_files()
        machine.nothing_is_lost_or_made_up()
        machine.an_adapter_is_counted_once_for_each_request_that_uses_it()
        machine.values_that_are_not_finite_are_never_found()
    machine.teardown()
    assert (machine.runner.num_ahead > 0) == machine.has_device
    stats = machine.engine.stats()
    assert (stats.num_accepted_tokens > 0) == (machine.num_speculative_tokens > 0)


assert EOS not in PROMPTS[0], "a prompt with EOS in it would say nothing about stopping"
