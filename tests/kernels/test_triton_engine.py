"""The whole engine on Triton's kernels, interpreted if there is no GPU, against PEFT in float32."""

import random
from pathlib import Path

from loraserve.models.causal_model import CausalModel
from loraserve.models.forward import DirectForward
from loraserve.models.fused_attention import FusedAttention
from tests.support.engines import Answer, add_adapters, greedy, make_engine, run
from tests.support.tiny_adapters import (
    Reference,
    adapter_configs,
    dora_configs,
    embedding_configs,
    reference_answers,
    save_adapters,
)
from tests.support.tiny_models import save_tiny_model, tiny_model

NUM_TOKENS = 4
VOCAB_SIZE = 259
ADAPTERS = ("patterns64", "embedding2", "dora_head9")
"""All linears with ranks 3 to 64; an adapted embedding and `lm_head`, which gets only the sampled rows; DoRA."""


def wrong_token(reference: Reference, answer: Answer) -> str | None:
    """Describes the first token that differs from PEFT's in its id or log-probability; None if there is none."""
    assert min(reference.margin(i) for i in range(NUM_TOKENS)) > 1e-3, "a tie: choose another seed"
    logprobs = reference.logits.log_softmax(-1)
    for i, (expected, found) in enumerate(zip(reference.token_ids, answer.logprobs, strict=True)):
        difference = abs(found.logprob - float(logprobs[i, expected]))
        if answer.token_ids[i] != expected or difference > 1e-4 * float(reference.logits[i, :VOCAB_SIZE].abs().max()):
            return f"output {i} is {answer.token_ids[i]} instead of {expected}, off by {difference:.2g}"
    return answer.error


def test_base_and_adapters_give_the_tokens_of_peft(triton_device: str, tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    configs = adapter_configs(model) | embedding_configs() | dora_configs(model)
    saved = save_adapters(model, tmp_path / "adapters", configs)
    adapters = {name: saved[name] for name in ADAPTERS}
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(length)]
        for name, length in zip([None, *ADAPTERS], (3, 21, 7, 5), strict=True)
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    engine = make_engine(tmp_path / "model", backend="triton", device=triton_device)
    description = engine.describe()
    assert description.backend == "triton"
    assert isinstance(engine._runner._model._forward, DirectForward), "a Llama's layers are fused, and called directly"
    assert [note for note in description.notes if "not used" in note] == []
    digests = {None: None, **add_adapters(engine, adapters, tmp_path / "packed")}

    def requests(turn: str, names: list[str | None]) -> list:
        return [greedy(f"{turn}-{name}", prompts[name], NUM_TOKENS, digests[name], logprobs=0) for name in names]

    answers = run(engine, requests("first", [*prompts]))
    wrong = {name: wrong_token(reference, answers[f"first-{name}", 0]) for name, reference in references.items()}
    assert wrong == dict.fromkeys(prompts)

    again = run(engine, requests("hit", ["patterns64"]))["hit-patterns64", 0]
    assert again.num_cached_tokens == 16
    assert wrong_token(references["patterns64"], again) is None


def test_fused_attention_with_sinks_gives_the_models_own_logits(triton_device: str) -> None:
    """GPT-OSS, which has one rotary factor for two features. If the logits differed, its own modules would be back."""
    from loraserve_kernels.triton_backend import TritonBackend

    model = tiny_model("gpt_oss").to(triton_device)
    CausalModel(model, TritonBackend()).prepare(48, VOCAB_SIZE, lambda *_: None)
    assert sum(isinstance(module, FusedAttention) for module in model.modules()) == model.config.num_hidden_layers
