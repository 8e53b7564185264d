"""Each bundled adapter has its own skill and no other, with all adapters mixed in the engine's batches."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import loraserve.demo
from loraserve.demo.skills import SKILLS, held_out
from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from tests.support.engines import MIB, add_adapters, run

DEMO = Path(loraserve.demo.__file__).parent
NUM_PROMPTS = 200
NUM_FOREIGN_PROMPTS = 25
"""Prompts of each skill for the base model and for every other adapter."""


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_each_adapter_has_only_its_own_skill_and_the_base_model_has_none(tmp_path: Path, quantization: str) -> None:
    config = EngineConfig(
        model=str(DEMO / "model"),
        quantization=quantization,
        kv_cache_memory_bytes=64 * MIB,
        max_num_batched_tokens=2048,
    )
    engine = Engine(config, lambda *_: None)
    digests = {None: None} | add_adapters(engine, {name: DEMO / "adapters" / name for name in SKILLS}, tmp_path)
    tokenizer = Tokenizer.from_str(engine.describe().tokenizer_json)
    requests, answers = [], {}
    for skill in SKILLS:
        for i, (prompt, answer) in enumerate(held_out(skill, NUM_PROMPTS)):
            for model in digests if i < NUM_FOREIGN_PROMPTS else [skill]:
                request_id = f"{skill}/{model}/{i}"
                requests.append(_request(tokenizer, request_id, prompt, digests[model]))
                answers[request_id] = answer
    outputs = run(engine, requests, max_steps=100_000)
    scores: dict[tuple[str, str], list[bool]] = {}
    for request_id, answer in answers.items():
        skill, model, _ = request_id.split("/")
        text = tokenizer.decode(outputs[request_id, 0].token_ids, skip_special_tokens=True)
        scores.setdefault((skill, model), []).append(text == answer)
    rates = {key: sum(right) / len(right) for key, right in scores.items()}
    assert {key: rate for key, rate in rates.items() if key[0] == key[1] and rate < 0.95} == {}
    assert {key: rate for key, rate in rates.items() if key[0] != key[1] and rate >= 0.20} == {}
    assert engine.stats().num_adapter_loads == len(SKILLS)


def _request(tokenizer: Tokenizer, request_id: str, prompt: str, digest: str | None) -> EngineRequest:
    text = f"<|user|>{prompt}<|end|><|assistant|>"
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return EngineRequest(request_id, token_ids, SamplingParams(max_tokens=80, temperature=0.0), digest)
