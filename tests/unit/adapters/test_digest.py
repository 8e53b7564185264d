import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import parse_config
from loraserve_adapters.digest import HashedTensor, adapter_digest, canonical_config
from loraserve_adapters.safetensors_file import TensorEntry
from loraserve_adapters.source import read_adapter

from tests.unit.adapters.folders import (
    config_of,
    lora_tensors,
    safetensors_bytes,
    tiny_layout,
    with_magnitudes,
    write_folder,
)

LAYOUT = tiny_layout()
TENSORS = lora_tensors(LAYOUT, ["q_proj", "v_proj"])
BOTH = {"target_modules": ["q_proj", "v_proj"]}


def digest_of(folder: Path, tensors: dict = TENSORS, **fields: Any) -> str:
    return read_adapter(write_folder(folder, config_of(**{**BOTH, **fields}), tensors), LAYOUT).digest


def test_digest_does_not_depend_on_order_metadata_or_fields_without_effect(tmp_path: Path) -> None:
    digest = digest_of(tmp_path)
    assert len(digest) == 64
    assert digest_of(tmp_path, dict(reversed(TENSORS.items()))) == digest
    assert digest_of(tmp_path, target_modules=["v_proj", "q_proj"]) == digest
    assert digest_of(tmp_path, lora_dropout=0.3, inference_mode=True, revision="main", peft_version="0.9") == digest
    assert digest_of(tmp_path, field_of_a_newer_peft=None, another={}) == digest
    assert digest_of(tmp_path, lora_alpha=8.0, rank_pattern=None, exclude_modules=[]) == digest
    assert digest_of(tmp_path, layers_to_transform=[], layers_pattern="layers") == digest
    write_folder(tmp_path, config_of(**BOTH), TENSORS)
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes(TENSORS, {"author": "someone"}))
    assert read_adapter(tmp_path, LAYOUT).digest == digest


def test_digest_does_not_depend_on_the_base_model(tmp_path: Path) -> None:
    digest = digest_of(tmp_path)
    assert read_adapter(tmp_path, tiny_layout("bfloat16")).digest == digest


def test_digest_changes_with_every_bit_dtype_and_option(tmp_path: Path) -> None:
    name, (dtype, shape, raw) = next(iter(TENSORS.items()))
    flipped = {**TENSORS, name: (dtype, shape, bytes([raw[0] ^ 1]) + raw[1:])}
    in_bfloat16 = lora_tensors(LAYOUT, ["q_proj", "v_proj"], dtype="bfloat16")
    digests = {
        digest_of(tmp_path),
        digest_of(tmp_path, flipped),
        digest_of(tmp_path, in_bfloat16),
        digest_of(tmp_path, lora_alpha=9),
        digest_of(tmp_path, use_rslora=True),
        digest_of(tmp_path, alpha_pattern={"q_proj": 9, "v_proj": 2}),
        digest_of(tmp_path, alpha_pattern={"v_proj": 2, "q_proj": 9}),
        digest_of(tmp_path, target_modules=r".*\.[qv]_proj"),
    }
    assert len(digests) == 8


def test_digest_changes_with_magnitudes(tmp_path: Path) -> None:
    digests = {
        digest_of(tmp_path),
        digest_of(tmp_path, with_magnitudes(TENSORS), use_dora=True),
        digest_of(tmp_path, with_magnitudes(TENSORS, seed=1), use_dora=True),
        digest_of(tmp_path, with_magnitudes(TENSORS, "bfloat16"), use_dora=True),
    }
    assert len(digests) == 4


def test_the_canonical_config_is_documented_by_example() -> None:
    config = parse_config(json.dumps(config_of(rank_pattern={"q": 2}, exclude_modules=["b", "a"])).encode())
    assert canonical_config(config) == (
        b'{"alpha_pattern":[],"exclude_modules":["a","b"],"layers_pattern":[],"layers_to_transform":[],'
        b'"lora_alpha":8.0,"lora_rank":4,"rank_pattern":[["q",2]],"target_modules":["q_proj"],"use_rslora":false}'
    )


def test_a_digest_is_the_same_as_in_earlier_releases() -> None:
    """Contents are stored under their digests, on disk and in Redis."""
    config = parse_config(json.dumps(config_of(rank_pattern={"q": 2})).encode())
    tensors = [
        HashedTensor(TensorEntry("a", "F32", (4, 32), 0, 0), bytes(32)),
        HashedTensor(TensorEntry("b", "BF16", (32, 4), 0, 0), bytes(range(32))),
    ]
    assert adapter_digest(config, tensors) == "bfd9838ca711e1d95a2683d37d66099486fdd59e50cc2d69cca3afce989f2973"


def test_the_canonical_config_includes_target_parameters_only_if_set() -> None:
    """So that contents keep the names that they had before the field existed."""

    def canonical(**fields: Any) -> bytes:
        return canonical_config(parse_config(json.dumps(config_of(**fields)).encode()))

    assert canonical(target_parameters=None) == canonical(target_parameters=[]) == canonical()
    assert b"target_parameters" not in canonical()
    two = canonical(target_parameters=["b", "a"])
    assert b'"target_parameters":["a","b"]' in two
    assert canonical(target_parameters=["a", "b"]) == two
    assert len({canonical(), canonical(target_parameters=["a"]), two}) == 3


@pytest.mark.parametrize("targets", [["q_proj"], []])
def test_a_clean_config_with_target_parameters_has_the_same_digest(targets: list[str]) -> None:
    config = config_of(target_modules=targets, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    parsed = parse_config(json.dumps(config).encode())
    cleaned = parse_config(clean_config(parsed))
    assert cleaned == parsed
    assert adapter_digest(cleaned, []) == adapter_digest(parsed, [])


tensors = st.builds(
    lambda name, dtype, shape, sha256: HashedTensor(TensorEntry(name, dtype, tuple(shape), 0, 0), sha256),
    st.text("ab1,[", max_size=3),
    st.sampled_from(["F32", "F16", "BF16"]),
    st.lists(st.integers(0, 12), max_size=2),
    st.binary(min_size=32, max_size=32).map(lambda value: value[:1] * 32),
)
tables = st.lists(tensors, max_size=3, unique_by=lambda tensor: tensor.entry.name)


@settings(max_examples=200, deadline=None)
@given(tables, tables)
def test_different_tables_have_different_digests(one: list[HashedTensor], other: list[HashedTensor]) -> None:
    config = parse_config(json.dumps(config_of()).encode())

    def by_name(table: list[HashedTensor]) -> list[HashedTensor]:
        return sorted(table, key=lambda tensor: tensor.entry.name)

    assert (adapter_digest(config, one) == adapter_digest(config, other)) == (by_name(one) == by_name(other))
