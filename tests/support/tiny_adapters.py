"""PEFT adapters of every shape we claim to support, saved by PEFT itself, and PEFT's own answers."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

OTHER_NAMES = {
    "q_proj": ("qkv_proj", "q_b_proj"),
    "k_proj": ("qkv_proj", "kv_a_proj_with_mqa"),
    "v_proj": ("qkv_proj", "kv_b_proj"),
    "gate_proj": ("gate_up_proj",),
}
NAMES_IN_LFM2 = {"o_proj": "out_proj", "up_proj": "w3", "down_proj": "w2"}
_RECURRENT = ["in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
_OTHER_MLPS = ["w1", "w2", "w3", "input_linear", "output_linear"]
ALL_LINEAR = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *_RECURRENT,
    *_LATENT,
    *_OTHER_MLPS,
]


def adapter_configs(model: PreTrainedModel) -> dict[str, LoraConfig]:
    """Seven adapters: ranks 1 to 64, whole and partial targets, rsLoRA, patterns, lm_head; on experts too, if the model
    has them."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    experts = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.dim() == 3}
    experts.discard("weight")  # of a convolution

    def present(targets: Sequence[str]) -> list[str]:
        found = [next((name for name in (t, *OTHER_NAMES.get(t, ())) if name in names), None) for t in targets]
        return sorted({name for name in found if name})

    def parameters(*suffixes: str) -> list[str]:
        return [suffix for suffix in suffixes if suffix.rpartition(".")[2] in experts]

    all_experts = parameters("gate_up_proj", "down_proj")
    return {
        "rank1": LoraConfig(r=1, lora_alpha=2, target_modules=present(ALL_LINEAR), target_parameters=all_experts),
        "attention4": LoraConfig(r=4, lora_alpha=8, target_modules=present(["q_proj", "k_proj", "v_proj", "o_proj"])),
        "member8": LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=[] if experts else present(["v_proj"]),
            target_parameters=parameters("experts.down_proj"),
        ),
        "layer16": LoraConfig(
            r=16,
            lora_alpha=16,
            target_modules=present(ALL_LINEAR),
            layers_to_transform=[1],
            target_parameters=parameters("1.mlp.experts.gate_up_proj"),
        ),
        "rslora33": LoraConfig(
            r=33,
            lora_alpha=16,
            use_rslora=True,
            target_modules=present(ALL_LINEAR),
            target_parameters=all_experts,
        ),
        "patterns64": LoraConfig(
            r=64,
            lora_alpha=64,
            target_modules=present(ALL_LINEAR),
            rank_pattern={"o_proj": 3, **dict.fromkeys(parameters("experts.gate_up_proj"), 5)}
            | {rf"layers\.0\.mlp\.{gate}": 20 for gate in present(["gate_proj"])},
            alpha_pattern={"o_proj": 9} | dict.fromkeys(present(["down_proj"]), 32),
            target_parameters=all_experts,
        ),
        "head8": LoraConfig(r=8, lora_alpha=24, target_modules=[*present(["q_proj", "o_proj"]), "lm_head"]),
    }


def embedding_configs() -> dict[str, LoraConfig]:
    """On the embedding alone, and together with linears."""
    modules = ["embed_tokens", "q_proj", "down_proj", "lm_head"]
    return {
        "embedding5": LoraConfig(r=5, lora_alpha=10, target_modules=["embed_tokens"]),
        "embedding2": LoraConfig(
            r=33, lora_alpha=16, use_rslora=True, target_modules=modules, rank_pattern={"embed_tokens": 2}
        ),
    }


def token_configs(*, is_tied: bool) -> dict[str, LoraConfig]:
    """With trained rows of some tokens, in the embedding, `lm_head` or both, next to LoRA and DoRA on linears."""
    others = ["lm_head"] if not is_tied else []
    return {
        "tokens3": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], trainable_token_indices=[5, 250, 17]),
        "tokens_of_both": LoraConfig(
            r=2,
            lora_alpha=4,
            target_modules=["o_proj", "down_proj"],
            trainable_token_indices={"embed_tokens": [9, 4], "lm_head": [4, 77, 200]},
        ),
        "tokens_of_same": LoraConfig(
            r=2,
            target_modules=["v_proj"],
            trainable_token_indices={"model.embed_tokens": [9, 4], "lm_head": [9, 4]},
        ),
        "tokens_of_head": LoraConfig(
            r=3, use_dora=True, target_modules=["q_proj", "v_proj"], trainable_token_indices={"lm_head": [100, 2]}
        ),
        "tokens40": LoraConfig(
            r=8, target_modules=["down_proj", *others], trainable_token_indices=[*range(60, 20, -1)]
        ),
    }


def table_configs(*, is_tied: bool) -> dict[str, LoraConfig]:
    """With the whole embedding, `lm_head` or both, next to LoRA and DoRA on linears."""
    configs = {
        "own_head": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "own_embedding": LoraConfig(r=2, use_dora=True, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
        "own_both": LoraConfig(
            r=8,
            target_modules=["o_proj", "down_proj", "lm_head"],
            modules_to_save=["lm_head", "model.embed_tokens"],
        ),
    }
    if is_tied:
        return configs | {
            "own_tied": LoraConfig(
                r=3, target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True
            )
        }
    return configs | {
        "tokens_and_head": LoraConfig(
            r=3, target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[5, 250, 17]
        ),
        "head_and_embedding_lora": LoraConfig(
            r=5, target_modules=["embed_tokens", "up_proj"], modules_to_save=["lm_head"]
        ),
    }


def with_names_of(model: PreTrainedModel, configs: dict[str, LoraConfig]) -> dict[str, LoraConfig]:
    """The configs with the model's own names of linears, which are others in LFM2."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for config in configs.values():
        assert isinstance(config.target_modules, set)
        config.target_modules = {name if name in names else NAMES_IN_LFM2[name] for name in config.target_modules}
    return configs


def dora_configs(model: PreTrainedModel) -> dict[str, LoraConfig]:
    """Four with DoRA, one of them on `lm_head`, and a plain one."""
    all_linear = adapter_configs(model)["rank1"].target_modules
    assert all_linear is not None
    some = sorted(set(all_linear) & {"q_proj", "qkv_proj", "o_proj"})
    return {
        "dora1": LoraConfig(r=1, lora_alpha=2, use_dora=True, target_modules=all_linear),
        "plain8": LoraConfig(r=8, lora_alpha=16, target_modules=all_linear),
        "dora_layer5": LoraConfig(r=5, lora_alpha=10, use_dora=True, target_modules=some, layers_to_transform=[1]),
        "dora_head9": LoraConfig(r=9, lora_alpha=9, use_dora=True, target_modules=[*some, "lm_head"]),
        "dora_patterns70": LoraConfig(
            r=70,
            lora_alpha=16,
            use_rslora=True,
            use_dora=True,
            target_modules=all_linear,
            rank_pattern={"o_proj": 3},
            alpha_pattern={"o_proj": 9},
        ),
    }


def load_classifier(model: Path, num_labels: int) -> PreTrainedModel:
    """A classifier from a saved causal model, with a random head in place of its own."""
    loaded = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=num_labels, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


def save_adapters(
    model: PreTrainedModel, folder: Path, configs: Mapping[str, LoraConfig] | None = None, seed: int = 1
) -> dict[str, Path]:
    """Save every adapter of the configs, or of `adapter_configs`, under folder/<name>. What PEFT initializes with zeros
    is random too."""
    paths = {}
    for i, (name, config) in enumerate((configs or adapter_configs(model)).items()):
        # PEFT's `unload` would leave modules_to_save in the model.
        base = copy.deepcopy(model) if config.modules_to_save else model
        peft_model = get_peft_model(base, config, adapter_name="default")
        peft_model.create_or_update_model_card = lambda *_: None  # its template takes as long as everything else
        randomize(peft_model, seed + i)
        peft_model.save_pretrained(str(folder / name))
        model = model if config.modules_to_save else without_adapter(peft_model)
        paths[name] = folder / name
    return paths


def without_adapter(peft_model: PeftModel) -> PreTrainedModel:
    """The base model that it was made from, unchanged."""
    model = peft_model.unload()
    assert isinstance(model, PreTrainedModel)
    return model


def with_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """A copy of the model with the adapter. Once the model has computed experts, PEFT cannot load another adapter into
    it, because it finds their weights in another order. Ignores copies of base weights in the adapter's file: the
    model's may have been rounded since."""
    base = copy.deepcopy(model)
    weights = [(parameter, parameter.detach().clone()) for parameter in base.parameters()]
    peft_model = PeftModel.from_pretrained(base, str(folder)).eval()
    for parameter, weight in weights:
        parameter.data = weight
    return peft_model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random values, scaled so that each adapter moves the logits by about as much as the base's own spread."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # PEFT initializes these with the base's rows.
        if name.endswith("trainable_tokens_delta.default") or ".modules_to_save.default." in name:
            with torch.no_grad():
                parameter.add_(parameter.std() * torch.randn(parameter.shape, generator=generator))
        elif "lora_" in name:
            with torch.no_grad():
                fan_in = parameter[0].numel()
                values = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:  # PEFT initializes it with the norms of the base's weights
                    parameter.mul_(1 + 0.3 * values)
                else:
                    parameter.copy_(values * (0.7 if "lora_B" in name else 1.0) / fan_in**0.5)


@dataclass(frozen=True, slots=True)
class Reference:
    """PEFT's own answer to one prompt."""

    token_ids: list[int]
    logits: Tensor
    """[len(token_ids), vocab]: those from which each token was chosen."""
    hidden: Tensor
    """[len(prompt), hidden_size]: the last hidden states of the prompt, which `lm_head` sees."""

    def margin(self, position: int) -> float:
        top = self.logits[position].topk(2).values
        return float(top[0] - top[1])


def reference_answer(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int, vocab_size: int) -> Reference:
    """Greedy tokens with a whole forward pass for each: no cache, no batch. Ids from vocab_size on are masked."""
    tokens = list(prompt)
    rows = []
    hidden: Tensor | None = None
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=hidden is None)
            if hidden is None:
                hidden = output.hidden_states[-1][0].float()
            row = output.logits[0, -1].float()
            row[vocab_size:] = -torch.inf
            rows.append(row)
            tokens.append(int(row.argmax()))
    assert hidden is not None
    return Reference(tokens[len(prompt) :], torch.stack(rows), hidden)


def reference_answers(
    model: PreTrainedModel,
    adapters: dict[str, Path],
    prompts: dict[str | None, list[int]],
    num_tokens: int,
    vocab_size: int,
) -> dict[str | None, Reference]:
    """PEFT's answer to each adapter's prompt, one adapter at a time; None = the base model."""
    answers: dict[str | None, Reference] = {}
    for name, prompt in prompts.items():
        if name is None:
            answers[name] = reference_answer(model, prompt, num_tokens, vocab_size)
            continue
        answers[name] = reference_answer(with_adapter(model, adapters[name]), prompt, num_tokens, vocab_size)
    return answers


def forced_logits(
    model: PreTrainedModel,
    adapters: dict[str, Path],
    prompts: dict[str | None, list[int]],
    tokens: dict[str | None, list[int]],
) -> dict[str | None, Tensor]:
    """PEFT's logits in the model's dtype at each of the given tokens, [len(tokens), vocab]; None = the base model."""
    logits: dict[str | None, Tensor] = {}
    for name, prompt in prompts.items():
        if name is None:
            logits[name] = _forced(model, prompt, tokens[name])
            continue
        peft_model = with_adapter(model, adapters[name])
        for parameter in peft_model.parameters():
            parameter.data = parameter.data.to(model.dtype)
        logits[name] = _forced(peft_model, prompt, tokens[name])
    return logits


def _forced(model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits
    return logits[0, -len(tokens) :].float()
