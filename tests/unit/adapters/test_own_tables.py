"""Adapters with a whole embedding or `lm_head` of their own: reading, packing and refusals."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.checks import Checks
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import parse_config
from loraserve_adapters.digest import adapter_digest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.pack import load_and_pack, pack
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedAdapter
from loraserve_adapters.packed_file import read_packed
from loraserve_adapters.source import check_adapter, read_adapter
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
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

FIELD = "modules_to_save"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
TIED = with_embedding(tiny_layout())
UNTIED = replace(TIED, groups=(*TIED.groups[:-1], tuple(replace(module, is_tied=False) for module in TIED.groups[-1])))


def key(module: str, kind: str = "weight") -> str:
    return f"base_model.model.{module}.{kind}"


def table(seed: int = 3, shape: tuple[int, ...] = (VOCABULARY, HIDDEN)) -> RawTensor:
    return raw_tensor(np.random.default_rng(seed).standard_normal(shape, np.float32), "float32")


def adapter(
    folder: Path,
    saved: Sequence[str] = ("lm_head",),
    tables: Mapping[str, RawTensor] | None = None,
    targets: Sequence[str] = ("q_proj",),
    **fields: Any,
) -> Path:
    """tables: tensor name → tensor."""
    own = {key(HEAD): table()} if tables is None else tables
    config = config_of(**{FIELD: [*saved], "target_modules": [*targets], **fields})
    return write_folder(folder, config, lora_tensors(UNTIED, ("q_proj",)) | own)


def refusal(folder: Path, layout: BaseLayout = UNTIED) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, layout)
    return refused.value


def own_tables(packed: PackedAdapter, layout: BaseLayout) -> dict[str, Tensor]:
    values = torch.from_numpy(np.array(packed.payload)).view(getattr(torch, packed.table.dtype))
    members = [(index, module) for index, group in enumerate(layout.groups) for module in group]
    found = {}
    for own in packed.table.own_tables:
        group_index, module = members[own.member]
        assert (own.group_index, (own.num_rows, own.hidden_size)) == (group_index, module.weight_shape)
        assert own.offset * values.itemsize % ALIGNMENT_BYTES == 0
        size = own.num_rows * own.hidden_size
        found[module.name] = values[own.offset : own.offset + size].view(own.num_rows, own.hidden_size)
    return found


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["model.embed_tokens", "lm_head"]])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ensures", [False, True])
@pytest.mark.parametrize("layout_dtype", ["float32", "bfloat16"])
def test_own_tables_equal_those_of_peft(
    saved: list[str], tied: bool, ensures: bool, layout_dtype: str, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    """Whether the base's are tied or not, and with LoRA on the tables left out."""
    model = make_llama(tied)
    layout = layout_of(model, layout_dtype)
    targets = ["q_proj", *([] if ensures else saved)]
    folder = save_adapter(model, r=4, target_modules=targets, ensure_weight_tying=ensures, **{FIELD: saved})
    _change_tables(folder)
    theirs = PeftModel.from_pretrained(make_llama(tied), str(folder))
    found = own_tables(load_and_pack(folder, layout, tmp_path / "cache"), layout)
    assert {*found} == (
        {EMBEDDING, HEAD} if tied and ensures else {EMBEDDING if "embed" in name else HEAD for name in saved}
    )
    dtype = getattr(torch, layout_dtype)
    base = make_llama(tied)
    modules = {EMBEDDING: (theirs.get_input_embeddings(), base.get_input_embeddings())}
    modules[HEAD] = (theirs.get_output_embeddings(), base.get_output_embeddings())
    for name, (module, original) in modules.items():
        ours = found.get(name, original.weight.detach().to(dtype))
        assert torch.equal(ours, module.weight.detach().to(dtype))


def _change_tables(folder: Path) -> None:
    """As training would: all tables of the file, copies alike."""
    path = folder / "adapter_model.safetensors"
    noise = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5))
    save_file({name: t if "lora_" in name else t + noise for name, t in load_file(path).items()}, path)


@pytest.mark.parametrize("tied", [False, True])
def test_second_copies_that_peft_saves_for_added_tokens_are_compared(
    tied: bool, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama(tied)
    model.resize_token_embeddings(VOCABULARY + 8)
    layout = layout_of(model)
    folder = save_adapter(
        model, r=4, target_modules=["q_proj"], save={"save_embedding_layers": True}, **{FIELD: ["lm_head"]}
    )
    path = folder / "adapter_model.safetensors"
    saved = load_file(path)
    assert {key(HEAD), key(HEAD, "modules_to_save.weight"), key(HEAD, "original_module.weight")} <= {*saved}
    packed = load_and_pack(folder, layout, tmp_path / "cache")
    assert torch.equal(own_tables(packed, layout)[HEAD], saved[key(HEAD)])
    error = refusal(folder, layout_of(make_llama(tied)))
    assert error.code == "shape_mismatch"
    assert error.expected == f"[{VOCABULARY}, {HIDDEN}]"
    assert "serve the base model with the extended tables" in (error.remedy or "")
    for kind, code in (
        ("modules_to_save.weight", "unexpected_tensor"),
        ("original_module.weight", "base_weight_differs"),
    ):
        save_file(saved | {key(HEAD, kind): saved[key(HEAD, kind)] + 1}, path)
        assert (refusal(folder, layout).code, refusal(folder, layout).key) == (code, key(HEAD, kind))


def test_trained_tokens_beside_an_own_head_are_those_of_trl(save_adapter: SaveAdapter, tmp_path: Path) -> None:
    """Its `clone_chat_template` makes such adapters."""
    model = make_llama()
    layout = layout_of(model)
    folder = save_adapter(
        model, r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [9, 4]}, **{FIELD: ["lm_head"]}
    )
    packed = load_and_pack(folder, layout, tmp_path / "cache")
    assert [tokens.token_ids for tokens in packed.table.trained_tokens] == [(9, 4)]
    assert {*own_tables(packed, layout)} == {HEAD}


def test_a_headless_adapter_can_have_its_own_embedding_alone(tmp_path: Path) -> None:
    tensors = {name.replace("model.model.", "model."): t for name, t in lora_tensors(UNTIED, ("q_proj",)).items()}
    config = config_of(task_type="FEATURE_EXTRACTION", target_modules=["q_proj"], **{FIELD: ["embed_tokens"]})
    folder = write_folder(tmp_path / "a", config, tensors | {key("embed_tokens"): table()})
    assert {*own_tables(load_and_pack(folder, UNTIED, tmp_path), UNTIED)} == {EMBEDDING}
    folder = write_folder(tmp_path / "b", config | {FIELD: ["lm_head"]}, tensors | {key("lm_head"): table()})
    assert refusal(folder).key == key("lm_head")


def test_a_classifier_can_have_its_own_embedding_alone(tmp_path: Path) -> None:
    head = {key("score"): table(shape=(3, HIDDEN))}
    fields = {"task_type": "SEQ_CLS"}
    both = ["score", "embed_tokens"]
    folder = adapter(tmp_path / "a", both, head | {key(EMBEDDING): table()}, **fields)
    assert {*own_tables(load_and_pack(folder, UNTIED, tmp_path), UNTIED)} == {EMBEDDING}
    error = refusal(adapter(tmp_path / "b", ["score", "lm_head"], head | {key(HEAD): table()}, **fields))
    assert (error.code, error.key) == ("unexpected_tensor", key(HEAD))


def test_the_digest_covers_own_tables(tmp_path: Path) -> None:
    plain = parse_config(json.dumps(config_of()).encode())
    own = parse_config(json.dumps(config_of(**{FIELD: ["lm_head"]})).encode())
    assert adapter_digest(plain, []) != adapter_digest(own, [])
    assert adapter_digest(plain, []) == adapter_digest(parse_config(json.dumps(config_of(**{FIELD: []})).encode()), [])
    one, other = (adapter(tmp_path / str(seed), tables={key(HEAD): table(seed)}) for seed in (1, 2))
    assert read_adapter(one, UNTIED).digest != read_adapter(other, UNTIED).digest


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_the_clean_config_saves_the_same_modules_for_peft_and_for_us(saved: list[str]) -> None:
    config = parse_config(json.dumps(config_of(**{FIELD: saved})).encode())
    clean = clean_config(config)
    assert parse_config(clean).own_tables == config.own_tables == tuple(saved)
    assert LoraConfig(**json.loads(clean)).modules_to_save == saved
    of_classifier = parse_config(json.dumps(config_of(task_type="SEQ_CLS", **{FIELD: ["score", *saved]})).encode())
    assert parse_config(clean_config(of_classifier)).own_tables == tuple(saved)


def test_releases_without_own_tables_refuse_the_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(read_adapter(adapter(tmp_path / "adapter"), UNTIED), UNTIED, path := tmp_path / "file.packed")
    assert len(read_packed(path).table.own_tables) == 1
    monkeypatch.setattr("loraserve_adapters.packed_file.NEWEST_VERSION", 5)
    with pytest.raises(AdapterError, match="not a packed adapter of version"):
        read_packed(path)


def test_a_group_with_only_an_own_table_starts_there(tmp_path: Path) -> None:
    """For copies to a GPU, which the groups wait for."""
    folder = adapter(tmp_path / "adapter", ["lm_head", "embed_tokens"], {key(HEAD): table(), key(EMBEDDING): table(4)})
    packed = load_and_pack(folder, UNTIED, tmp_path).table
    assert (packed.offset_a[0], packed.offset_a[-1]) == (-1, -1)
    assert packed.group_starts[0] == 0
    assert packed.group_starts[-1] == packed.own_tables[-1].offset
    assert np.array_equal(packed.group_starts[1:-1], packed.offset_a[1:-1])


def test_the_summary_counts_tables_but_does_not_list_them_as_targets(tmp_path: Path) -> None:
    source, plain = read_adapter(adapter(tmp_path / "a"), UNTIED), read_adapter(adapter(tmp_path / "b", (), {}), UNTIED)
    assert source.summary.num_parameters == plain.summary.num_parameters + VOCABULARY * HIDDEN
    assert (source.summary.target_modules, source.summary.lora_ranks) == (("q_proj",), (4,))


@pytest.mark.parametrize(
    ("saved", "code", "said"),
    [
        (
            ["norm"],
            "unsupported_option",
            "only model.embed_tokens and lm_head of the base model can be an adapter's own",
        ),
        (["lm_head", "q_proj"], "unsupported_option", 'found ["q_proj"]'),
        (["proj"], "unsupported_option", 'found ["proj"]'),
        ([""], "invalid_field", "a list of names"),
        ("lm_head", "invalid_field", "a list of names"),
        ([f"m{i}" for i in range(9)], "too_large", "9 names; at most 8"),
        (["x" * 513], "too_large", "513 characters; at most 512"),
    ],
)
def test_other_modules_are_refused_by_name(saved: Any, code: str, said: str, tmp_path: Path) -> None:
    config = config_of(**{FIELD: saved, "target_modules": ["q_proj"]})
    error = refusal(write_folder(tmp_path, config, lora_tensors(UNTIED, ("q_proj",))))
    assert (error.code, error.key) == (code, FIELD)
    assert said in error.message


@pytest.mark.parametrize(
    ("tables", "code", "said"),
    [
        ({}, "missing_tensor", "has modules_to_save for its module"),
        ({key(HEAD): table(shape=(VOCABULARY + 1, HIDDEN))}, "shape_mismatch", f"found [{VOCABULARY + 1}, {HIDDEN}]"),
        ({key(HEAD): table(shape=(VOCABULARY * HIDDEN,))}, "shape_mismatch", f"expected [{VOCABULARY}, {HIDDEN}]"),
        ({key(HEAD): ("I8", (VOCABULARY, HIDDEN), bytes(VOCABULARY * HIDDEN))}, "bad_dtype", "found I8"),
        ({key(HEAD): raw_tensor(np.full((VOCABULARY, HIDDEN), np.nan, np.float32))}, "not_finite", "NaN"),
        ({key(HEAD): table(), key(EMBEDDING): table()}, "base_weight_differs", "differs from the served base model's"),
        ({key(HEAD): table(), key(HEAD, "default.weight"): table()}, "unexpected_tensor", "neither a LoRA tensor"),
    ],
)
def test_tables_that_do_not_match_the_config_are_refused(
    tables: dict[str, RawTensor], code: str, said: str, tmp_path: Path
) -> None:
    error = refusal(adapter(tmp_path, tables=tables))
    assert error.code == code
    assert said in error.message


def test_copies_for_a_tied_head_must_be_equal(tmp_path: Path) -> None:
    fields = {"ensure_weight_tying": True}
    equal = {key(HEAD): table(), key(EMBEDDING): table()}
    folder = adapter(tmp_path / "a", ["model.embed_tokens"], equal, **fields)
    found = own_tables(load_and_pack(folder, TIED, tmp_path), TIED)
    assert torch.equal(found[HEAD], found[EMBEDDING])
    folder = adapter(tmp_path / "b", ["model.embed_tokens"], equal | {key(HEAD): table(4)}, **fields)
    assert "of which it should be a copy" in refusal(folder, TIED).message
    folder = adapter(tmp_path / "c", ["model.embed_tokens"], {key(EMBEDDING): table()}, **fields)
    assert (refusal(folder, TIED).code, refusal(folder, TIED).key) == ("missing_tensor", key(HEAD))
    folder = adapter(tmp_path / "d", ["model.embed_tokens"], {key(HEAD): table()}, **fields)
    assert (refusal(folder, TIED).code, refusal(folder, TIED).key) == ("missing_tensor", key(EMBEDDING))


def test_tables_are_tied_only_if_peft_knows_their_names(save_adapter: SaveAdapter, tmp_path: Path) -> None:
    model = make_llama(tied=True)
    layout = layout_of(model)
    folder = save_adapter(model, r=4, target_modules=["q_proj"], ensure_weight_tying=True, **{FIELD: ["tokens"]})
    _change_tables(folder)
    theirs = PeftModel.from_pretrained(make_llama(tied=True), str(folder))
    found = own_tables(load_and_pack(folder, layout, tmp_path / "cache"), layout)
    assert {*found} == {EMBEDDING}
    assert torch.equal(found[EMBEDDING], theirs.get_input_embeddings().weight)
    assert torch.equal(theirs.get_output_embeddings().weight, make_llama(tied=True).lm_head.weight)


@pytest.mark.parametrize("entry", ["lm.head", "q_pro.", "q_(proj|x)", "lm_head|q_proj", "model/embed_tokens"])
def test_entries_that_are_patterns_are_refused(entry: str, tmp_path: Path) -> None:
    """PEFT would leave out LoRA on modules that match them."""
    error = refusal(adapter(tmp_path, ["lm_head", entry]))
    assert error.key == FIELD
    assert error.code in ("invalid_field", "unsupported_pattern")


@pytest.mark.parametrize(
    ("fields", "layout", "said"),
    [
        ({"alora_invocation_tokens": [1]}, UNTIED, "cannot be combined with modules_to_save (lm_head)"),
        ({"trainable_token_indices": {"lm_head": [1]}}, UNTIED, "cannot be combined with modules_to_save for lm_head"),
        ({"trainable_token_indices": [1]}, TIED, "modules_to_save for lm_head, which is tied to the embedding"),
    ],
)
def test_combinations_that_peft_refuses_or_computes_otherwise_are_refused(
    fields: dict[str, Any], layout: BaseLayout, said: str, tmp_path: Path
) -> None:
    error = refusal(adapter(tmp_path, **fields), layout)
    assert (error.code, error.key) == ("invalid_field", next(iter(fields)))
    assert said in error.message


def test_a_table_with_a_bias_is_refused(save_adapter: SaveAdapter) -> None:
    """PEFT trains the bias, too."""
    model = make_phi()
    layout = layout_of(model)
    folder = save_adapter(model, r=4, target_modules=["q_proj"], **{FIELD: ["lm_head"]})
    error = refusal(folder, layout)
    assert (error.code, error.found) == ("unsupported_option", '"lm_head"')
    assert "has a bias" in error.message


def test_a_base_model_without_tables_refuses_by_name(tmp_path: Path) -> None:
    layout = replace(UNTIED, groups=UNTIED.groups[1:-1], other_modules=(*UNTIED.other_modules, EMBEDDING, HEAD))
    error = refusal(adapter(tmp_path), layout)
    assert (error.code, error.key) == ("unsupported_option", FIELD)
    assert "no module of the base model can be an adapter's own" in error.message


@pytest.mark.parametrize("saved", [["lm_head", "embed_token"], ["head"]])
def test_entries_are_ends_of_names_as_in_peft(saved: list[str], save_adapter: SaveAdapter, tmp_path: Path) -> None:
    """TRL's documentation has a name that is none, embed_token: PEFT ignores it."""
    model = make_llama()
    layout = layout_of(model)
    folder = save_adapter(model, r=4, target_modules=["q_proj"], **{FIELD: saved})
    assert {*own_tables(load_and_pack(folder, layout, tmp_path / "cache"), layout)} == {HEAD}
    checks = Checks()
    check_adapter(folder, layout, checks)
    warned = [check for check in checks.listed() if check.found == '"embed_token"']
    assert len(warned) == ("embed_token" in saved)


def test_a_classifiers_head_needs_its_task_type(tmp_path: Path) -> None:
    error = refusal(adapter(tmp_path, ["lm_head", "score"], task_type="CAUSAL_LM"))
    assert (error.code, error.key) == ("unsupported_option", FIELD)
    assert "needs a task_type of SEQ_CLS" in error.message


def test_lora_on_a_table_that_peft_would_not_leave_out_is_refused(tmp_path: Path) -> None:
    """It would save the whole module with its LoRA."""
    assert refusal(adapter(tmp_path, ["head"], targets=["q_proj", "lm_head"])).code == "invalid_field"
