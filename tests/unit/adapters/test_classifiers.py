"""Classifiers: adapters that PEFT saves with their own head, which replaces the base's."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import parse_config, read_config
from loraserve_adapters.digest import adapter_digest
from loraserve_adapters.dtypes import STORAGE
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.pack import load_and_pack, pack
from loraserve_adapters.packed_file import read_packed
from loraserve_adapters.source import read_adapter
from peft import LoraConfig

from tests.unit.adapters.folders import (
    HIDDEN,
    RawTensor,
    config_of,
    lora_tensors,
    raw_tensor,
    tiny_layout,
    values_of,
    write_folder,
)

HEAD = "base_model.model.score.weight"
SAVED = ["classifier", "score"]
NUM_LABELS = 3


def head_of(num_labels: int = NUM_LABELS, dtype: str = "float32", hidden_size: int = HIDDEN) -> RawTensor:
    values = np.random.default_rng(num_labels).standard_normal((num_labels, hidden_size), np.float32)
    return raw_tensor(values, dtype)


def classifier(
    folder: Path, head: RawTensor | None = None, more: Mapping[str, RawTensor] | None = None, **fields: Any
) -> Path:
    config = config_of(**{"task_type": "SEQ_CLS", "modules_to_save": SAVED, **fields})
    tensors = lora_tensors(tiny_layout(), ["q_proj"]) | {HEAD: head or head_of()} | (more or {})
    return write_folder(folder, config, tensors)


def refusal(folder: Path) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, tiny_layout())
    return refused.value


TEMPLATE = "query: {query}\ndocument: {document}</s>"


def names(*labels: str) -> dict[str, str]:
    return {str(index): label for index, label in enumerate(labels)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modules_to_save": None},
        {"modules_to_save": ["score"], "task_type": None},
        {"id2label": None, "problem_type": None, "label2id": None},
    ],
)
def test_a_seq_cls_task_or_a_saved_head_makes_an_adapter_a_classifier(fields: dict[str, Any], tmp_path: Path) -> None:
    source = read_adapter(classifier(tmp_path, **fields), tiny_layout())
    assert source.config.is_classifier
    assert (source.config.labels, source.config.problem_type) == ((), None)
    assert source.judged.head is not None
    assert source.judged.head.shape == (NUM_LABELS, HIDDEN)
    assert source.summary.num_labels == NUM_LABELS
    assert source.summary.target_modules == ("q_proj",)
    assert source.summary.dtypes == ("float32",)
    assert source.summary.num_parameters == 2 * (4 * HIDDEN + 4 * HIDDEN) + NUM_LABELS * HIDDEN


def test_label_names_and_problem_type_are_read_from_the_config(tmp_path: Path) -> None:
    labels = {"2": "réclamation", "0": "billing", "1": "log in"}
    label2id = {"billing": 0, "log in": 1, "réclamation": 2}
    folder = classifier(tmp_path, id2label=labels, problem_type="multi_label_classification", label2id=label2id)
    config = read_config(folder)
    assert config.labels == ("billing", "log in", "réclamation")
    assert config.problem_type == "multi_label_classification"


def test_lm_head_among_the_targets_of_a_classifier_is_ignored(tmp_path: Path) -> None:
    """As in PEFT, whose trained model has no module of that name."""
    source = read_adapter(classifier(tmp_path, target_modules=["q_proj", "lm_head"]), tiny_layout())
    assert {module.target.module.name for module in source.modules} == {
        f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)
    }


def test_a_classifier_with_one_label_may_have_a_score_template(tmp_path: Path) -> None:
    source = read_adapter(classifier(tmp_path, head=head_of(1), score_template=TEMPLATE), tiny_layout())
    assert source.config.score_template == TEMPLATE


def test_a_score_template_with_several_labels_is_refused(tmp_path: Path) -> None:
    error = refusal(classifier(tmp_path, score_template=TEMPLATE))
    assert (error.code, error.key) == ("invalid_field", "score_template")
    assert "found 3 labels, expected one" in error.message


@pytest.mark.parametrize(
    "fields",
    [{"id2label": names("a", "b", "c")}, {"problem_type": "regression"}, {"score_template": "{query} {document}"}],
)
def test_label_fields_without_a_head_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(**fields), lora_tensors(tiny_layout(), ["q_proj"]))
    error = refusal(folder)
    assert (error.code, error.key) == ("invalid_field", next(iter(fields)))
    assert "SEQ_CLS" in error.message


@pytest.mark.parametrize(
    ("field", "value", "code", "named"),
    [
        ("id2label", ["a", "b", "c"], "invalid_field", '"0"'),
        ("id2label", {"0": "a", "2": "b", "3": "c"}, "invalid_field", "by number"),
        ("id2label", {"0": "a", "1": "b", "2": 3}, "invalid_field", "by number"),
        ("id2label", names("a", "b"), "invalid_field", "found 2 names, expected 3"),
        ("id2label", names("a", "b", ""), "invalid_field", "of 0 bytes; 1 to 256 are accepted"),
        ("id2label", names("a", "b", "é" * 129), "invalid_field", "of 258 bytes; 1 to 256"),
        (
            "id2label",
            names(*(f"{index:0256}" for index in range(33))),
            "too_large",
            "8448 bytes in total; at most 8192",
        ),
        (
            "id2label",
            names("a", "b", "a\x1b[31m"),
            "invalid_field",
            "control characters or characters that change the text direction",
        ),
        (
            "id2label",
            names("a", "b", "\u202egnillib"),
            "invalid_field",
            "control characters or characters that change the text direction",
        ),
        ("problem_type", "token", "invalid_field", "single_label_classification"),
        ("problem_type", 1, "invalid_field", "regression"),
        ("score_template", "{query}: {documents}", "invalid_field", "{query} and {document} exactly once each"),
        ("score_template", "{query} {document} {query}", "invalid_field", "exactly once each"),
        (
            "score_template",
            "{query}\x00{document}",
            "invalid_field",
            "control characters or characters that change the text direction",
        ),
        (
            "score_template",
            "{query}\u202e{document}",
            "invalid_field",
            "control characters or characters that change the text direction",
        ),
        ("score_template", ["{query}", "{document}"], "invalid_field", "exactly once each"),
        ("score_template", "{query}{document}" + 4080 * "é", "too_large", "8177 bytes; at most 4096"),
        ("label2id", ["a"], "invalid_field", "null or the inverse of id2label"),
        ("label2id", {"a": 0}, "invalid_field", "null or the inverse of id2label"),
        ("modules_to_save", ["score", "embed_tokens"], "unsupported_option", "embed_tokens"),
        ("modules_to_save", "score", "invalid_field", "a list of names"),
        ("task_type", "CAUSAL_LM", "unsupported_option", "needs a task_type of SEQ_CLS"),
    ],
)
def test_refuses_invalid_and_unsupported_fields_by_name(
    field: str, value: object, code: str, named: str, tmp_path: Path
) -> None:
    error = refusal(classifier(tmp_path, **{field: value}))
    assert error.code == code
    assert error.key in (field, "modules_to_save")
    assert named in error.message


@pytest.mark.parametrize(
    ("head", "code", "named"),
    [
        (head_of(hidden_size=HIDDEN + 1), "shape_mismatch", "found [3, 33], expected [number of labels, 32]"),
        (("F32", [HIDDEN], bytes(4 * HIDDEN)), "shape_mismatch", "found [32]"),
        (("F32", [0, HIDDEN], b""), "shape_mismatch", "found [0, 32]"),
        (("I32", [2, HIDDEN], bytes(8 * HIDDEN)), "bad_dtype", "I32"),
        (head_of(4097), "too_large", "4097 labels; at most 4096"),
        (raw_tensor(np.full((2, HIDDEN), np.nan, np.float32)), "not_finite", "NaN"),
    ],
)
def test_refuses_invalid_heads_by_name(head: RawTensor, code: str, named: str, tmp_path: Path) -> None:
    error = refusal(classifier(tmp_path, head))
    assert (error.code, error.key) == (code, HEAD)
    assert named in error.message


def test_a_task_without_its_head_and_a_head_without_its_task_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(tiny_layout(), ["q_proj"])
    error = refusal(write_folder(tmp_path / "missing", config_of(task_type="SEQ_CLS"), tensors))
    assert (error.code, error.key) == ("missing_tensor", HEAD)
    error = refusal(write_folder(tmp_path / "more", config_of(), tensors | {HEAD: head_of()}))
    assert (error.code, error.key) == ("unexpected_tensor", HEAD)
    assert "SEQ_CLS" in error.message
    error = refusal(classifier(tmp_path / "bias", more={"base_model.model.score.bias": raw_tensor(np.ones(3, "f4"))}))
    assert (error.code, error.key) == ("unexpected_tensor", "base_model.model.score.bias")


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("saved", ["float32", "float16", "bfloat16"])
def test_the_head_is_packed_in_float32_whatever_the_dtype(dtype: str, saved: str, tmp_path: Path) -> None:
    layout, head = tiny_layout(dtype), head_of(5, saved)
    packed = load_and_pack(classifier(tmp_path / "adapter", head), layout, tmp_path)
    packed_head = packed.table.head
    assert packed_head is not None
    assert (packed_head.num_labels, packed_head.hidden_size) == (5, HIDDEN)
    start = packed_head.offset * STORAGE[dtype].itemsize
    assert start % 256 == packed.size_bytes % 256 == 0
    values = np.array(packed.payload)[start : start + 4 * 5 * HIDDEN].view(np.float32).reshape(5, HIDDEN)
    assert np.array_equal(values, values_of(head))
    assert packed.size_bytes == start + 3 * 256  # 640 bytes, rounded up to a multiple of 256
    plain = write_folder(tmp_path / "plain", config_of(), lora_tensors(tiny_layout(), ["q_proj"]))
    assert load_and_pack(plain, layout, tmp_path).table.head is None


def test_large_heads_are_packed_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = tiny_layout("bfloat16")
    folder = classifier(tmp_path / "adapter", head_of(100, "float16"))
    pack(read_adapter(folder, layout), layout, tmp_path / "whole")
    monkeypatch.setattr("loraserve_adapters.safetensors_file._BLOCK_BYTES", 200)
    pack(read_adapter(folder, layout), layout, tmp_path / "in_blocks")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "in_blocks").read_bytes()


def test_releases_without_heads_refuse_a_packed_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = tiny_layout()
    pack(read_adapter(classifier(tmp_path / "adapter"), layout), layout, path := tmp_path / "file.packed")
    assert read_packed(path).table.head is not None
    monkeypatch.setattr("loraserve_adapters.packed_file.NEWEST_VERSION", 3)
    with pytest.raises(AdapterError, match="not a packed adapter of version"):
        read_packed(path)


def test_the_digest_includes_head_label_names_problem_type_and_score_template(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"head": head_of(4)},
        {"id2label": names("a", "b", "c")},
        {"id2label": names("a", "c", "b")},
        {"problem_type": "regression"},
        {"problem_type": "multi_label_classification"},
        {"head": head_of(1)},
        {"head": head_of(1), "score_template": TEMPLATE},
        {"head": head_of(1), "score_template": f"{TEMPLATE} "},
    ]
    folders = [classifier(tmp_path / str(index), **fields) for index, fields in enumerate(options)]
    assert len({read_adapter(folder, tiny_layout()).digest for folder in folders}) == len(options)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"id2label": names("a", "b", "c"), "problem_type": "regression"},
        {"head": head_of(1), "id2label": names("relevant"), "score_template": TEMPLATE},
    ],
)
def test_the_clean_config_is_equivalent_and_readable_by_peft(fields: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(classifier(tmp_path, **fields))
    data = clean_config(config)
    assert adapter_digest(parse_config(data), []) == adapter_digest(config, [])
    (tmp_path / "adapter_config.json").write_bytes(data)
    with pytest.warns(UserWarning, match="id2label") if fields else nullcontext():
        read = LoraConfig.from_pretrained(str(tmp_path))
    assert (str(read.task_type), read.modules_to_save) == ("SEQ_CLS", SAVED)
    assert json.loads(data)["task_type"] == "SEQ_CLS"


def test_the_clean_config_of_the_most_labels_is_accepted_again(tmp_path: Path) -> None:
    """With the maximum number of labels, whose names JSON could write in a longer form."""
    labels = ["é" if index < 3900 else "a" for index in range(4096)]
    config = read_config(classifier(tmp_path, id2label=names(*labels)))
    assert parse_config(clean_config(config)).labels == tuple(labels)
