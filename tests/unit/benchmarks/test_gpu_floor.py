import pytest
from gpu.floor import floor_records
from gpu.llama import adapter_bytes, kv_bytes_per_token, llama_8b, read_weight_bytes
from gpu.record import Arm, Figure
from gpu.work import ATTENTION, RANK_16, AdapterKind, Work
from transformers import LlamaConfig

LAYER_WEIGHTS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
HEAD_WEIGHTS = 128_256 * 4096
ADAPTER_BYTES = 32 * 81_920 * 16 * 2


def test_the_bytes_of_llama_8b_match_its_shapes() -> None:
    config = llama_8b()
    assert read_weight_bytes(config) == 2 * (32 * LAYER_WEIGHTS + 4096 + HEAD_WEIGHTS)
    assert kv_bytes_per_token(config) == 131_072
    assert adapter_bytes(config, RANK_16) == ADAPTER_BYTES
    assert adapter_bytes(config, AdapterKind("", (8, 16, 48))) == 1.5 * ADAPTER_BYTES
    attention_widths = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    assert adapter_bytes(config, ATTENTION) == 32 * attention_widths * 16 * 2


def test_a_tied_head_reads_as_many_bytes_as_an_untied_one() -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "head_dim": 16}
    tied, untied = (
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied)
        for is_tied in (True, False)
    )
    assert read_weight_bytes(tied) == read_weight_bytes(untied)


def test_a_floor_counts_weights_once_and_each_sequence_and_adapter() -> None:
    work = Work(batch_sizes=(1, 64, 128), other_kinds=(AdapterKind("r8/24", (8, 24), num_adapters=32),))
    floors = {
        (record.batch_size, record.num_adapters, record.adapters): record.value
        for record in floor_records(llama_8b(), work, 4e12)
    }
    base_ms = 2 * (32 * LAYER_WEIGHTS + 4096 + HEAD_WEIGHTS) / 4e9
    # 128 tokens in and out: the 127 steps after the first token see 129 to 255 keys.
    kv_ms = 192 * 131_072 / 4e9
    adapter_ms = ADAPTER_BYTES / 4e9
    assert floors == {
        (1, 0, "r16"): pytest.approx(base_ms + kv_ms),
        (1, 1, "r16"): pytest.approx(base_ms + kv_ms + adapter_ms),
        (64, 0, "r16"): pytest.approx(base_ms + 64 * kv_ms),
        (64, 1, "r16"): pytest.approx(base_ms + 64 * kv_ms + adapter_ms),
        (64, 8, "r16"): pytest.approx(base_ms + 64 * kv_ms + 8 * adapter_ms),
        (64, 64, "r16"): pytest.approx(base_ms + 64 * kv_ms + 64 * adapter_ms),
        (128, 0, "r16"): pytest.approx(base_ms + 128 * kv_ms),
        (128, 1, "r16"): pytest.approx(base_ms + 128 * kv_ms + adapter_ms),
        (128, 8, "r16"): pytest.approx(base_ms + 128 * kv_ms + 8 * adapter_ms),
        (128, 64, "r16"): pytest.approx(base_ms + 128 * kv_ms + 64 * adapter_ms),
        (64, 32, "r8/24"): pytest.approx(base_ms + 64 * kv_ms + 32 * adapter_ms),
    }


def test_floors_are_recorded_like_the_decode_steps_they_belong_to() -> None:
    (record, *_) = floor_records(llama_8b(), Work(), 4e12)
    assert (record.arm, record.figure) == (Arm.FLOOR, Figure.DECODE_STEP)
    assert (record.prompt_tokens, record.output_tokens) == (128, 128)


def test_adapters_of_all_kinds_fit_into_the_memory_for_rank_16() -> None:
    config, work = llama_8b(), Work()
    floors = {(each.batch_size, each.num_adapters, each.adapters) for each in floor_records(config, work, 4e12)}
    assert {(64, 16, "r64"), (128, 128, "r8"), (256, 256, "r4")} <= floors
    room = work.max_adapters * adapter_bytes(config, work.kind)
    assert all(kind.num_adapters * adapter_bytes(config, kind) <= room for kind in work.other_kinds)
