import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.engine.errors import EngineStartError
from loraserve.engine.memory_plan import GIB, MAX_SAVED_STATES, MemoryPlan, plan_memory

BLOCK_BYTES = 1000


def plan(
    available_bytes: int = GIB,
    block_bytes: int = BLOCK_BYTES,
    model_max_len: int = 2048,
    requested_max_len: int | None = None,
    kv_cache_bytes: int | None = None,
    adapter_bytes: int | None = None,
    enable_lora: bool = True,
    max_num_seqs: int = 128,
    state_bytes: int = 0,
    saves_states: bool = True,
) -> MemoryPlan:
    return plan_memory(
        available_bytes=available_bytes,
        block_bytes=block_bytes,
        block_size=16,
        model_max_len=model_max_len,
        requested_max_len=requested_max_len,
        kv_cache_bytes=kv_cache_bytes,
        adapter_bytes=adapter_bytes,
        enable_lora=enable_lora,
        max_num_seqs=max_num_seqs,
        state_bytes=state_bytes,
        saves_states=saves_states,
    )


def test_by_default_cache_and_arena_each_take_a_share_of_available_memory() -> None:
    chosen = plan(available_bytes=1_000_000)
    assert chosen.num_blocks == 400
    assert chosen.arena_size_bytes == 150_000
    assert chosen.max_model_len == 2048
    assert chosen.notes == ()


def test_defaults_are_bounded_on_a_large_machine() -> None:
    chosen = plan(available_bytes=1000 * GIB, block_bytes=GIB // 16)
    assert chosen.num_blocks == 64
    assert chosen.arena_size_bytes == 2 * GIB


def test_requested_sizes_are_used() -> None:
    chosen = plan(kv_cache_bytes=200_999, adapter_bytes=77, requested_max_len=100)
    assert chosen == MemoryPlan(
        num_blocks=200, num_state_slots=0, max_num_seqs=128, max_model_len=100, arena_size_bytes=77, notes=()
    )


def test_without_lora_there_is_no_arena_and_its_size_does_not_count() -> None:
    assert plan(available_bytes=10_000, kv_cache_bytes=10_000, adapter_bytes=1, enable_lora=False).arena_size_bytes == 0


def test_requesting_more_than_is_available_names_the_options_to_lower() -> None:
    with pytest.raises(EngineStartError, match="exceed the 10000 bytes available: lower --kv-cache-memory-bytes or"):
        plan(available_bytes=10_000, kv_cache_bytes=9_000, adapter_bytes=1_001)


def test_a_cache_of_fewer_than_two_blocks_names_the_option_to_raise() -> None:
    with pytest.raises(EngineStartError, match=r"holds 1 blocks of 1000 bytes.*raise --kv-cache-memory-bytes"):
        plan(kv_cache_bytes=1999)
    assert plan(kv_cache_bytes=2000).num_blocks == 2


@pytest.mark.parametrize("available_bytes", [0, 4000])
def test_a_model_that_leaves_too_little_memory_is_refused_for_that_reason(available_bytes: int) -> None:
    with pytest.raises(EngineStartError) as refused:
        plan(available_bytes=available_bytes)
    assert f"the weights leave {available_bytes} bytes" in str(refused.value)
    assert "more memory" in str(refused.value)
    assert "--kv-cache-memory-bytes" not in str(refused.value)


def test_a_max_model_len_above_the_models_is_refused() -> None:
    with pytest.raises(EngineStartError, match="--max-model-len 2049 exceeds the model's 2048 positions"):
        plan(requested_max_len=2049)


def test_max_model_len_is_lowered_to_the_size_of_the_cache_with_a_note() -> None:
    chosen = plan(kv_cache_bytes=5_000)
    assert chosen.max_model_len == 80
    assert "lowered from 2048 to 80" in chosen.notes[0]
    assert "--kv-cache-memory-bytes" in chosen.notes[0]
    assert plan(kv_cache_bytes=5_000, requested_max_len=80).notes == ()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    available=st.integers(0, 1 << 40),
    block=st.integers(1, 1 << 30),
    kv=st.none() | st.integers(0, 1 << 40),
    adapter=st.none() | st.integers(0, 1 << 40),
)
def test_a_plan_never_exceeds_available_memory_and_one_sequence_always_fits(
    available: int, block: int, kv: int | None, adapter: int | None
) -> None:
    try:
        chosen = plan(available, block, kv_cache_bytes=kv, adapter_bytes=adapter)
    except EngineStartError:
        return
    assert chosen.num_blocks * block + chosen.arena_size_bytes <= available
    assert 1 < chosen.max_model_len <= chosen.num_blocks * 16


def test_recurrent_states_take_at_most_half_of_the_cache() -> None:
    chosen = plan(kv_cache_bytes=2_000_000, state_bytes=10_000, max_num_seqs=64)
    assert chosen.num_state_slots == 100
    assert chosen.num_blocks == 1000
    assert chosen.max_num_seqs == 64
    assert chosen.notes == ()


def test_small_states_leave_the_cache_to_keys_and_values() -> None:
    chosen = plan(kv_cache_bytes=2_000_000, state_bytes=10, max_num_seqs=64)
    assert chosen.num_state_slots == 64 + MAX_SAVED_STATES
    assert plan(kv_cache_bytes=2_000_000, state_bytes=10, max_num_seqs=64, saves_states=False).num_state_slots == 64


@pytest.mark.parametrize(("saves_states", "expected"), [(True, 75), (False, 100)])
def test_max_num_seqs_is_lowered_to_the_states_that_fit_with_a_note(saves_states: bool, expected: int) -> None:
    chosen = plan(kv_cache_bytes=2_000_000, state_bytes=10_000, saves_states=saves_states)
    assert chosen.max_num_seqs == expected
    assert chosen.notes == (
        f"max_num_seqs lowered from 128 to {expected}: each sequence has a recurrent state of 10000 bytes "
        "(--kv-cache-memory-bytes)",
    )


def test_a_cache_without_room_for_one_state_is_refused() -> None:
    assert plan(kv_cache_bytes=20_000, state_bytes=10_000).max_num_seqs == 1
    with pytest.raises(EngineStartError, match=r"half of a KV cache of 19999 bytes does not hold .* of 10000 bytes"):
        plan(kv_cache_bytes=19_999, state_bytes=10_000)


def test_saved_states_give_way_to_the_requested_length() -> None:
    """Here 20 states, half of the cache, would leave 200 blocks of 16 tokens."""
    sizes = {"kv_cache_bytes": 400_000, "state_bytes": 10_000, "model_max_len": 100_000}
    assert plan(**sizes, max_num_seqs=1).num_state_slots == 20
    assert plan(**sizes, max_num_seqs=1).max_model_len == 200 * 16
    assert plan(**sizes, max_num_seqs=1, requested_max_len=200 * 16).num_state_slots == 20
    longer = plan(**sizes, max_num_seqs=1, requested_max_len=200 * 16 + 1)
    assert (longer.num_state_slots, longer.num_blocks, longer.max_model_len) == (19, 210, 200 * 16 + 1)
    assert longer.notes == ()
    longest = plan(**sizes, max_num_seqs=1, requested_max_len=390 * 16)
    assert (longest.num_state_slots, longest.num_blocks, longest.max_model_len) == (1, 390, 390 * 16)
    assert longest.notes == ()


def test_states_of_sequences_do_not_give_way_to_the_requested_length() -> None:
    chosen = plan(
        kv_cache_bytes=400_000, state_bytes=10_000, model_max_len=100_000, max_num_seqs=8, requested_max_len=390 * 16
    )
    assert (chosen.num_state_slots, chosen.max_num_seqs, chosen.num_blocks) == (8, 8, 320)
    assert "max_model_len lowered from 6240 to 5120" in chosen.notes[0]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    kv=st.integers(0, 1 << 24),
    block=st.integers(1, 1 << 16),
    state=st.integers(1, 1 << 20),
    seqs=st.integers(1, 300),
    length=st.none() | st.integers(1, 5000),
    saves=st.booleans(),
)
def test_a_plan_with_states_fits_and_has_one_for_each_sequence(
    kv: int, block: int, state: int, seqs: int, length: int | None, saves: bool
) -> None:
    try:
        chosen = plan(
            block_bytes=block,
            kv_cache_bytes=kv,
            state_bytes=state,
            max_num_seqs=seqs,
            requested_max_len=length,
            model_max_len=5000,
            saves_states=saves,
        )
    except EngineStartError:
        return
    assert chosen.num_blocks * block + chosen.num_state_slots * state <= kv
    assert 1 <= chosen.max_num_seqs <= min(seqs, chosen.num_state_slots)
    assert saves or chosen.num_state_slots == chosen.max_num_seqs
    if length is not None and chosen.max_model_len < length:
        assert chosen.num_state_slots == chosen.max_num_seqs, "saved states are where keys and values could be"
