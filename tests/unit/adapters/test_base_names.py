"""Names of one base model: folders, owners, quantized copies."""

import pytest
from loraserve_adapters.base_names import is_base_name

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    "name",
    [
        LLAMA,
        "Llama-3.1-8B-Instruct",
        "/models/llama-3.1-8b-instruct/",
        "unsloth/Llama-3.1-8B-Instruct-bnb-4bit",
        "unsloth/Llama-3.1-8B-Instruct-unsloth-bnb-4bit",
        "hugging-quants/Llama-3.1-8B-Instruct-AWQ-INT4",
        "someone/Llama-3.1-8B-Instruct-GPTQ",
        "someone/Llama-3.1-8B-Instruct-gptq-4bit-128g",
        "someone/Llama-3.1-8B-Instruct-quantized.w4a16",
        "someone/Llama-3.1-8B-Instruct-FP8-dynamic",
        "someone/Llama-3.1-8B-Instruct_int8",
    ],
)
def test_folders_copies_and_quantized_versions_match_the_base_name(name: str) -> None:
    assert is_base_name(name, ["served", LLAMA])
    assert is_base_name(LLAMA, [name])


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-bnb-4bit",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct-AWQ-2",
        "Llama-3.1-8B-Instruct-AWQ/other",
        "AWQ",
        "-AWQ",
        "",
        pytest.param("-awq" * 200_000 + "-x", id="long"),
    ],
)
def test_names_of_other_models_do_not_match(name: str) -> None:
    assert not is_base_name(name, [LLAMA])
    assert not is_base_name(LLAMA, [name])
