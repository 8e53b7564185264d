"""Tokens for which an adapter has its own rows of the embedding or `lm_head`: reading, packing and refusals."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import parse_config
from loraserve_adapters.digest import adapter_digest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.pack import load_and_pack, pack
from loraserve_adapters.packed import PackedAdapter
from loraserve_adapters.packed_file import read_packed
from loraserve_adapters.source import read_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.adapters.conftest import SaveAdapter, layout_of, make_llama, make_phi
from tests.unit.adapters.folders import (
    HIDDEN,
    VOCABULARY,
    RawTensor,
    config_of,
    lora_tensors,
    raw_tensor,
    tiny_layout,
    with_embedding,
    write_folder,
)

FIELD = "trainable_token_indices"
Tokens = Sequence[int] | Mapping[str, Sequence[int]]
LAYOUT = with_embedding(tiny_layout())
"""Its `lm_head` is tied."""


def rows_key(module: str = "model.embed_tokens") -> str:
    return f"base_model.model.{module}.token_adapter.trainable_tokens_delta"


def rows_of(num_tokens: int, dtype: str = "float32", hidden_size: int = HIDDEN, seed: int = 3) -> RawTensor:
    return raw_tensor(np.random.default_rng(seed).standard_normal((num_tokens, hidden_size), np.float32), dtype)


def adapter(
    folder: Path,
    tokens: Tokens = (9, 4),
    rows: Mapping[str, RawTensor] | None = None,
    targets: Sequence[str] = ("q_proj",),
    **fields: Any,
) -> Path:
    """rows: table name → tensor."""
    given = rows_of(2) if rows is None else None
    of_tables = {"model.embed_tokens": given} if rows is None else rows
    tensors = lora_tensors(LAYOUT, targets) | {rows_key(name): rows for name, rows in of_tables.items() if rows}
    return write_folder(folder, config_of(**{FIELD: tokens, "target_modules": [*targets], **fields}), tensors)


def refusal(folder: Path, layout: BaseLayout = LAYOUT) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, layout)
    return refused.value


def own_rows(packed: PackedAdapter, layout: BaseLayout) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """Table → (token ids from its one-hot matrix, rows [num_tokens, hidden_size]), by the layout in packed.py."""
    table = packed.table
    values = torch.from_numpy(np.array(packed.payload)).view(getattr(torch, table.dtype))
    groups = [index for index, group in enumerate(layout.groups) for _ in group]
    members = [module for group in layout.groups for module in group]
    found = {}
    for tokens in table.trained_tokens:
        module, num_tokens = members[tokens.member], len(tokens.token_ids)
        assert (table.lora_rank[tokens.member], table.scaling[tokens.member]) == (num_tokens, 1)
        a, b = int(table.offset_a[groups[tokens.member]]), int(table.offset_b[tokens.member])
        selector_start, start = (a, b) if module.is_embedding else (b, a)
        selector = values[selector_start:][: num_tokens * VOCABULARY].view(num_tokens, VOCABULARY).float()
        assert torch.equal(selector.sum(1), torch.ones(num_tokens))
        rows = values[start:][: num_tokens * HIDDEN].view(num_tokens, HIDDEN)
        assert selector.argmax(1).tolist() == list(tokens.token_ids)
        found[module.name] = tokens.token_ids, rows
    return found


TOKENS = [
    [9, 4, 33],
    {"embed_tokens": [9, 4]},
    {"model.embed_tokens": [63]},
    {"lm_head": [7]},
    {"embed_tokens": [9, 4], "lm_head": [9, 4]},
    {"lm_head": [0, 4], "embed_tokens": [4, 0]},
    {"embed_tokens": [9], "lm_head": [1, 2, 3]},
]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout_dtype", ["float32", "bfloat16"])
def test_tables_with_trained_rows_equal_those_of_peft(
    tokens: Tokens, tied: bool, layout_dtype: str, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama(tied)
    layout = layout_of(model, layout_dtype)
    base = model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()
    folder = save_adapter(model, r=4, target_modules=["q_proj"], **{FIELD: tokens})
    found = own_rows(load_and_pack(folder, layout, tmp_path / "cache"), layout)
    theirs = PeftModel.from_pretrained(make_llama(tied), str(folder))
    dtype = getattr(torch, layout_dtype)
    tables = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
    for name, table, expected in zip(("model.embed_tokens", "lm_head"), base, tables, strict=True):
        token_ids, rows = found.pop(name, ((), torch.empty(0, HIDDEN, dtype=dtype)))
        ours = table.to(dtype).index_copy(0, torch.tensor(token_ids, dtype=torch.int64), rows)
        assert torch.equal(ours, expected.detach().to(dtype))
    assert not found


@pytest.mark.parametrize("tied", [False, True])
def test_tables_that_peft_saves_with_added_tokens_are_copies_of_the_served_ones(
    tied: bool, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    """With a tied `lm_head`, PEFT saves its rows twice, too."""
    model = make_llama(tied)
    model.resize_token_embeddings(VOCABULARY + 8)
    layout = layout_of(model)
    tokens = [VOCABULARY, VOCABULARY + 3]
    folder = save_adapter(
        model, r=4, target_modules=["q_proj"], save={"save_embedding_layers": True}, **{FIELD: tokens}
    )
    saved = load_file(str(folder / "adapter_model.safetensors"))
    assert f"{rows_key().removesuffix('.trainable_tokens_delta')}.base_layer.weight" in saved
    assert (rows_key("lm_head") in saved) == tied
    packed = load_and_pack(folder, layout, tmp_path / "cache")
    assert [len(table.token_ids) for table in packed.table.trained_tokens] == [2] * (1 + tied)
    assert refusal(folder, layout_of(make_llama(tied))).found == str(VOCABULARY + 3)


def test_the_summary_counts_rows_but_does_not_list_their_tables_as_targets(tmp_path: Path) -> None:
    source = read_adapter(adapter(tmp_path / "adapter"), LAYOUT)
    plain = read_adapter(adapter(tmp_path / "plain", {}, {}), LAYOUT)
    assert source.summary.num_parameters == plain.summary.num_parameters + 2 * HIDDEN
    assert (source.summary.target_modules, source.summary.lora_ranks) == (("q_proj",), (4,))


def test_a_headless_adapter_has_trained_rows_in_the_embedding_alone(tmp_path: Path) -> None:
    tensors = {name.replace("model.model.", "model."): raw for name, raw in lora_tensors(LAYOUT, ["q_proj"]).items()}
    tensors[rows_key("embed_tokens")] = rows_of(2)
    config = config_of(task_type="FEATURE_EXTRACTION", **{FIELD: [9, 4]})
    folder = write_folder(tmp_path / "adapter", config, tensors)
    packed = load_and_pack(folder, LAYOUT, tmp_path / "cache")
    assert [*own_rows(packed, LAYOUT)] == ["model.embed_tokens"]


def test_a_classifier_has_trained_rows_in_the_embedding_alone(tmp_path: Path) -> None:
    tensors = {**lora_tensors(LAYOUT, ["q_proj"]), rows_key(): rows_of(2)}
    head = {"base_model.model.score.weight": raw_tensor(np.ones((3, HIDDEN), np.float32))}
    config = config_of(task_type="SEQ_CLS", modules_to_save=["score"], **{FIELD: [9, 4]})
    packed = load_and_pack(write_folder(tmp_path / "adapter", config, tensors | head), LAYOUT, tmp_path / "cache")
    assert [*own_rows(packed, LAYOUT)] == ["model.embed_tokens"]
    assert packed.table.head is not None


def test_the_digest_includes_token_ids_and_rows(tmp_path: Path) -> None:
    both = {"model.embed_tokens": rows_of(2), "lm_head": rows_of(2)}
    others = [
        adapter(tmp_path / "1"),
        adapter(tmp_path / "2", (4, 9)),
        adapter(tmp_path / "3", rows={"model.embed_tokens": rows_of(2, "bfloat16")}),
        adapter(tmp_path / "4", {"embed_tokens": (9, 4), "lm_head": (9, 5)}, both),
        adapter(tmp_path / "5", {}, {}),
    ]
    digests = [read_adapter(folder, LAYOUT).digest for folder in others]
    assert len({*digests}) == len(others)
    turned = adapter(tmp_path / "6", {"lm_head": (9, 5), "embed_tokens": (9, 4)}, both)
    assert read_adapter(turned, LAYOUT).digest == digests[3]
    plain = config_of()
    assert adapter_digest(parse_config(json.dumps(plain).encode()), []) == adapter_digest(
        parse_config(json.dumps(plain | {FIELD: None}).encode()), []
    )


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_clean_config_has_the_same_tokens_for_peft_and_for_us(tokens: Tokens) -> None:
    config = parse_config(json.dumps(config_of(**{FIELD: tokens})).encode())
    clean = clean_config(config)
    assert parse_config(clean).trained_tokens == config.trained_tokens
    assert LoraConfig(**json.loads(clean)).trainable_token_indices == tokens


def test_releases_without_trained_rows_refuse_the_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(read_adapter(adapter(tmp_path / "adapter"), LAYOUT), LAYOUT, path := tmp_path / "file.packed")
    assert len(read_packed(path).table.trained_tokens) == 2
    monkeypatch.setattr("loraserve_adapters.packed_file.NEWEST_VERSION", 4)
    with pytest.raises(AdapterError, match="not a packed adapter of version"):
        read_packed(path)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([9, 9], "token id 9 is listed more than once"),
        ([9, -1], "a list of token ids"),
        ([], "a list of token ids"),
        ([9, 4.0], "a list of token ids"),
        ("9", "null, a list of token ids, or an object with such a list for each table"),
        ({"embed_tokens": 9}, "a list of token ids"),
        ([9, VOCABULARY], f"token id {VOCABULARY} is outside model.embed_tokens of the base model (0 to 63)"),
        ({"wte": [9, 4]}, "which has model.embed_tokens and lm_head"),
        ({"": [9, 4]}, "null, a list of token ids, or an object with such a list for each table"),
        ({"tokens": [9, 4]}, "which has model.embed_tokens and lm_head"),
        ({"embed_tokens": [9, 4], "model.embed_tokens": [9, 4]}, "names model.embed_tokens twice"),
    ],
)
def test_invalid_token_lists_are_refused(tokens: Any, said: str, tmp_path: Path) -> None:
    error = refusal(adapter(tmp_path, tokens))
    assert error.key is not None
    assert error.key.startswith(FIELD)
    assert said in error.message


def test_a_token_outside_the_tokenizers_vocabulary_is_refused(tmp_path: Path) -> None:
    """Tables often have more rows than the tokenizer has tokens."""
    error = refusal(adapter(tmp_path, [9, 40]), replace(LAYOUT, vocab_size=40))
    assert (error.found, error.expected) == ("40", "0 to 39")
    assert "--tokenizer" in (error.remedy or "")
    read_adapter(adapter(tmp_path, [9, 39]), replace(LAYOUT, vocab_size=40))


def test_more_tokens_than_the_limit_are_refused(tmp_path: Path) -> None:
    error = refusal(adapter(tmp_path, [*range(129)]))
    assert (error.code, error.found, error.expected) == ("too_large", "129 tokens", "at most 128")
    with pytest.raises(AdapterError, match="5 tokens; at most 4"):
        read_adapter(adapter(tmp_path, [*range(5)]), LAYOUT, AdapterLimits(max_lora_rank=4))


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        ({}, "missing_tensor", f"has {FIELD} for its module"),
        ({"model.embed_tokens": rows_of(3)}, "shape_mismatch", f"found [3, {HIDDEN}], expected [2, {HIDDEN}]"),
        ({"model.embed_tokens": rows_of(2, hidden_size=31)}, "shape_mismatch", f"expected [2, {HIDDEN}]"),
        ({"model.embed_tokens": ("I8", (2, HIDDEN), bytes(2 * HIDDEN))}, "bad_dtype", "found I8"),
        ({"model.embed_tokens": raw_tensor(np.full((2, HIDDEN), np.nan, np.float32))}, "not_finite", "NaN"),
        (
            {"model.embed_tokens": rows_of(2), "lm_head": rows_of(2, seed=4)},
            "unexpected_tensor",
            "of which it should be a copy",
        ),
        ({"model.embed_tokens": rows_of(2), "lm_head": rows_of(3)}, "shape_mismatch", "found [3,"),
        ({"model.embed_tokens": rows_of(2), "model.norm": rows_of(2)}, "unexpected_tensor", "holds rows of tokens"),
    ],
)
def test_rows_that_do_not_match_the_config_are_refused(
    rows: dict[str, RawTensor], code: str, said: str, tmp_path: Path
) -> None:
    error = refusal(adapter(tmp_path, rows=rows))
    assert error.code == code
    assert said in error.message


def test_rows_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    error = refusal(adapter(tmp_path, {}, {"model.embed_tokens": rows_of(2)}))
    assert (error.code, error.key) == ("unexpected_tensor", rows_key())


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "embed_tokens"], "cannot be combined with LoRA on model.embed_tokens"),
        (["q_proj", "lm_head"], "cannot be combined with LoRA on lm_head, which is tied to the embedding"),
    ],
)
def test_lora_on_the_same_table_is_refused(targets: list[str], said: str, tmp_path: Path) -> None:
    error = refusal(adapter(tmp_path, targets=targets))
    assert (error.code, error.key) == ("invalid_field", FIELD)
    assert said in error.message


TIED = {"ensure_weight_tying": True}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], FIELD: [9, 4]},
        {"target_modules": ["q_proj"], FIELD: {"embed_tokens": [9, 4], "lm_head": [9, 4]}},
        {"target_modules": ["q_proj"], FIELD: {"lm_head": [9, 4]}},
    ],
)
def test_ensure_weight_tying_is_accepted_if_it_changes_nothing(
    fields: dict[str, Any], tied: bool, save_adapter: SaveAdapter
) -> None:
    model = make_llama(tied)
    layout = layout_of(model)
    source = read_adapter(save_adapter(model, r=4, **fields, **TIED), layout)
    assert parse_config(clean_config(source.config)).ensures_weight_tying


@pytest.mark.parametrize("table", ["embed_tokens", "lm_head"])
def test_lora_that_tied_tables_share_is_refused_but_accepted_for_an_untied_base(
    table: str, save_adapter: SaveAdapter
) -> None:
    for tied in (False, True):
        model = make_llama(tied)
        layout = layout_of(model)
        folder = save_adapter(model, r=4, target_modules=["q_proj", table], **TIED)
        if not tied:
            read_adapter(folder, layout)
            continue
        error = refusal(folder, layout)
        assert (error.code, error.key) == ("unsupported_option", "ensure_weight_tying")


def test_different_tokens_of_lm_head_with_weight_tying_are_refused_as_by_peft(tmp_path: Path) -> None:
    tokens = {"embed_tokens": [9, 4], "lm_head": [9, 5]}
    error = refusal(adapter(tmp_path, tokens, {"model.embed_tokens": rows_of(2), "lm_head": rows_of(2)}, **TIED))
    assert (error.code, error.key) == ("invalid_field", FIELD)
    with pytest.raises(ValueError, match="Cannot ensure weight tying"):
        get_peft_model(make_llama(True), LoraConfig(target_modules=["q_proj"], trainable_token_indices=tokens, **TIED))


def test_trained_tokens_of_an_activated_adapter_are_refused(tmp_path: Path) -> None:
    """PEFT would also apply them before the invocation."""
    error = refusal(adapter(tmp_path, alora_invocation_tokens=[3], task_type="CAUSAL_LM"))
    assert error.key == "alora_invocation_tokens"
    assert FIELD in error.message


def test_tables_that_cannot_have_trained_rows_are_refused_by_name(tmp_path: Path, save_adapter: SaveAdapter) -> None:
    without_head = replace(LAYOUT, groups=LAYOUT.groups[:-1])
    for layout, name in ((tiny_layout(), "embedding"), (without_head, "lm_head")):
        error = refusal(adapter(tmp_path / name), layout)
        assert (error.code, name in error.message) == ("unsupported_module", True)
        assert FIELD in (error.remedy or "")
    model = make_phi()
    layout = layout_of(model)
    folder = save_adapter(model, r=4, target_modules=["q_proj"], **{FIELD: {"lm_head": [3]}})
    error = refusal(folder, layout)
    assert (error.code, "has a bias" in error.message) == ("unsupported_option", True)
