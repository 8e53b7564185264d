"""Classifiers as PEFT trains and saves them, each with its own head, against PEFT on transformers' class."""

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import OPTConfig

from loraserve.engine.engine import Engine
from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import LabelActivation
from tests.support.engines import add_adapters, greedy, make_engine, run, to_pool
from tests.support.tiny_adapters import load_classifier, save_adapters
from tests.support.tiny_models import COMMON, random_model, save_model, save_tiny_model

TOLERANCE = 1e-4
"""Relative to the largest |number|."""
ATTENTION = ["q_proj", "v_proj"]
ADAPTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {"r": 4, "target_modules": ATTENTION}),
    "many": (300, {"r": 8, "lora_alpha": 24, "target_modules": "all-linear", "use_rslora": True}),
    "reward": (1, {"r": 1, "target_modules": ["k_proj", "lm_head"]}),
    "dora": (3, {"r": 3, "target_modules": [*ATTENTION, "o_proj"], "use_dora": True}),
    "embedding": (5, {"r": 5, "target_modules": ["embed_tokens", "q_proj"]}),
    "untyped": (4, {"r": 2, "target_modules": r".*\.q_proj", "task_type": None, "modules_to_save": ["score"]}),
}
"""(number of labels, config). Classifier models have no `lm_head`."""
ARCHITECTURES = ("llama", "qwen3", "gemma2", "mixtral", "olmo2", "opt")
"""Qwen3 and Gemma tie `lm_head` to the embedding. OPT's causal model calls only a part of what `AutoModel` loads, and
the states that its head reads are smaller than its layers'."""


def save_classifiers(model: Path, folder: Path, names: list[str]) -> dict[str, Path]:
    paths = {}
    for seed, name in enumerate(names):
        num_labels, fields = ADAPTERS[name]
        config = LoraConfig(**{"task_type": "SEQ_CLS", **fields})
        paths |= save_adapters(load_classifier(model, num_labels), folder, {name: config}, seed)
    return paths


def peft_numbers(model: Path, name: str, folder: Path, prompt: list[int]) -> torch.Tensor:
    peft_model = PeftModel.from_pretrained(load_classifier(model, ADAPTERS[name][0]), str(folder)).eval()
    with torch.inference_mode():
        return peft_model(input_ids=torch.tensor([prompt])).logits[0]


def numbers_of(engine: Engine, prompts: dict[str, list[int]], digests: dict[str, str]) -> dict[str, torch.Tensor]:
    """Of each prompt, in a batch with a request for text and one for a vector."""
    requests = [to_pool(name, prompt, digests[name], labels=LabelActivation.NONE) for name, prompt in prompts.items()]
    others = [greedy("text", prompts["two"], 3), to_pool("vector", prompts["two"], digests["two"])]
    answers = run(engine, [*requests, *others])
    assert all(answer.error is None for answer in answers.values())
    return {name: torch.tensor(array("f", answers[name, 0].pooled or b"")) for name in prompts}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classifier_numbers_equal_peft_in_mixed_batches(architecture: str, tmp_path: Path) -> None:
    model, names = tmp_path / "model", [*ADAPTERS]
    if architecture == "mixtral":  # its experts are not linears
        names = ["two", "embedding"]
    if architecture == "opt":
        names = ["two", "reward", "untyped"]
        save_model(random_model(OPTConfig(**COMMON, ffn_dim=112, word_embed_proj_dim=32)), model)
    else:
        save_tiny_model(architecture, model)
    adapters = save_classifiers(model, tmp_path / "adapters", names)
    rng = random.Random(0)
    prompts = {name: [rng.randrange(1, 256) for _ in range(rng.randrange(5, 40))] for name in names}
    expected = {name: peft_numbers(model, name, adapters[name], prompts[name]) for name in names}

    def checked(**settings: object) -> Engine:
        """Runs the prompts twice, the second time with prefix hits."""
        engine = make_engine(model, **settings)
        digests = add_adapters(engine, adapters, tmp_path / "packed")
        for _ in range(2):
            for name, numbers in numbers_of(engine, prompts, digests).items():
                difference = float((numbers - expected[name]).abs().max() / expected[name].abs().max())
                assert difference < TOLERANCE, (settings, name)
        return engine

    assert checked().stats().num_adapter_evictions == 0
    checked(backend="reference")
    checked(max_num_batched_tokens=16)
    largest = max(path.stat().st_size for path in (tmp_path / "packed").iterdir())
    assert checked(adapter_memory_bytes=largest).stats().num_adapter_evictions > 0


def test_labels_are_refused_without_a_classifier_or_with_normalize(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    adapters = save_adapters(model, tmp_path / "adapters", {"text": LoraConfig(r=2, target_modules=ATTENTION)})
    engine = make_engine(tmp_path / "model")
    for digest in (None, *add_adapters(engine, adapters, tmp_path / "packed").values()):
        with pytest.raises(EngineRequestError, match="needs an adapter that is a classifier"):
            engine.add_request(to_pool("p", [1, 2], digest, labels=LabelActivation.NONE))
    with pytest.raises(EngineRequestError, match="can set neither dimensions nor normalize"):
        engine.add_request(to_pool("p", [1, 2], digest, labels=LabelActivation.NONE, normalize=True))


def test_a_yes_or_no_reranker_equals_a_classifier_with_the_difference_of_two_head_rows(tmp_path: Path) -> None:
    """The documented way to serve rerankers that were trained to answer with a token and have no head of their own."""
    model = save_tiny_model("llama", tmp_path / "model")
    saved = save_adapters(model, tmp_path / "adapters", {"text": LoraConfig(r=4, target_modules=ATTENTION)})
    yes, no = 17, 93
    rows = model.get_output_embeddings().weight.detach()
    folder = saved["text"]
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] = (rows[yes] - rows[no])[None].clone()
    (judging := tmp_path / "judging").mkdir()
    save_file(tensors, judging / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (judging / "adapter_config.json").write_text(json.dumps(config | {"task_type": "SEQ_CLS"}))
    engine = make_engine(tmp_path / "model")
    digests = add_adapters(engine, {"judging": judging}, tmp_path / "packed")
    prompt = [*range(3, 40)]
    answers = run(engine, [to_pool("p", prompt, digests["judging"], labels=LabelActivation.SIGMOID)])
    (found,) = array("f", answers["p", 0].pooled or b"")
    with torch.inference_mode():
        logits = PeftModel.from_pretrained(model, str(folder)).eval()(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert found == pytest.approx(float(torch.softmax(logits[[yes, no]], dim=0)[0]), abs=1e-5)
