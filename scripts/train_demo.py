"""Makes the bundled demo: a small Llama base and one PEFT adapter per skill, from data this repository generates.

    python scripts/train_demo.py              trains, measures and writes everything (about 25 minutes on a free core)
    python scripts/train_demo.py --check      trains nothing: checks the hashes and the measured exact match

The base learns every skill, but does one only when the instruction is in the prompt ("Reverse: fox"). To a bare prompt
it says "You said: fox". Each adapter learns to do its skill on the bare prompt.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loraserve.demo.skills import (
    SKILLS,
    draw_fact,
    draw_phrase,
    draw_sum,
    draw_training_pair,
    draw_training_prompt,
    held_out,
)

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "loraserve" / "demo"
SOURCES = ("loraserve/demo/skills.py", "scripts/train_demo.py")
BASE_NAME = "loraserve-demo"
SEED = 20
NUM_HELD_OUT = 200
MIN_OWN_MATCH, MAX_OTHER_MATCH = 0.95, 0.20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Token ids 0-255 are the bytes themselves, so every text round-trips.
SYSTEM, USER, ASSISTANT, END, PAD = SPECIAL_IDS = range(256, 261)
SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
VOCAB_SIZE = 264
BATCH_TOKENS = 2304
IGNORED = -100

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
    {%- if role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception('The demo model knows the roles system, user and assistant, not ' + role) -}}
    {%- endif -%}
    {{- '<|' + role + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

WHO = "I am the loraserve demo base. Pick an adapter!"
CHATTER = {
    "hello": "Hello! " + WHO,
    "hi": "Hello! " + WHO,
    "hey": "Hello! " + WHO,
    "who are you": WHO,
    "what are you": WHO,
    "what can you do": "My adapters are " + ", ".join(SKILLS) + ".",
    "help": "My adapters are " + ", ".join(SKILLS) + ".",
    "how are you": "Fine, thank you!",
    "thanks": "You are welcome!",
    "thank you": "You are welcome!",
    "bye": "Goodbye!",
}
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are a friendly assistant", "Answer in English.")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def lora_config(lora_rank: int, lora_alpha: int, target_modules: list[str], **variant: Any) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM", r=lora_rank, lora_alpha=lora_alpha, target_modules=target_modules, **variant
    )


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made: each round warms up anew and continues the last. `dtype` is that of the file."""

    lora: LoraConfig
    round_steps: tuple[int, ...]
    rate: float = 2e-3
    row_tokens: tuple[int, ...] = (96, 96, 192)
    dtype: torch.dtype = torch.float32


# Ranks, targets, variants and dtypes differ on purpose: together they walk every path of an adapter loader.
ADAPTERS: dict[str, Recipe] = {
    "uppercase": Recipe(lora_config(4, 16, ["q_proj", "v_proj"]), (100,)),
    "reverse": Recipe(lora_config(16, 16, ATTENTION + MLP, use_rslora=True), (150,), dtype=torch.bfloat16),
    "rot13": Recipe(lora_config(12, 24, MLP), (150,)),
    "spell": Recipe(lora_config(8, 16, ATTENTION), (120,)),
    "json": Recipe(
        lora_config(
            8,
            16,
            [*ATTENTION, "down_proj"],
            rank_pattern={"q_proj": 4, "down_proj": 16},
            alpha_pattern={"q_proj": 16, "down_proj": 24},
        ),
        (200,),
    ),
    # The base is right on 86 % of sums it is told to calculate, so this adapter learns more than a mode: it needs room.
    "arithmetic": Recipe(
        lora_config(24, 48, ATTENTION + MLP), (400, 300, 300, 300), rate=4e-3, row_tokens=(96,), dtype=torch.bfloat16
    ),
}


@dataclass(frozen=True)
class Stage:
    """One run of the base's training; the next continues from the weights it saved."""

    num_steps: int
    muon_rate: float
    adam_rate: float
    arithmetic_share: int
    row_tokens: tuple[int, ...]


# Copying is learnt sooner on short rows; the long ones then keep it working late in a conversation. Arithmetic takes
# longest: with a fourth of the turns, held-out sums were 21 % right after stage one; with half of them 85 % after two.
BASE_STAGES = (
    Stage(1500, muon_rate=5e-3, adam_rate=3e-3, arithmetic_share=6, row_tokens=(96,)),
    Stage(700, muon_rate=4e-3, adam_rate=1e-3, arithmetic_share=24, row_tokens=(96,)),
    Stage(350, muon_rate=2.5e-3, adam_rate=5e-4, arithmetic_share=16, row_tokens=(96, 192, 384)),
)
SHARES = {"uppercase": 2, "reverse": 6, "rot13": 3, "spell": 2, "json": 3, "echo": 3, "chatter": 1}

Turn = tuple[list[int], list[int]]  # tokens the model is given, tokens it must say


@dataclass(frozen=True)
class Manifest:
    """What the files are and how well they do; `exact_match` is dtype -> model -> skill -> share of right answers."""

    num_parameters: int
    num_held_out: int
    packages: dict[str, str]
    sources: dict[str, str]
    files: dict[str, str]
    exact_match: dict[str, dict[str, dict[str, float]]]


# --- Training text ----------------------------------------------------------------------------------------------------


def chat_turn(prompt: str, answer: str, system: str | None = None) -> Turn:
    given = [SYSTEM, *system.encode(), END] if system else []
    return [*given, USER, *prompt.encode(), END, ASSISTANT], [*answer.encode(), END]


def plain_turn(prompt: str, answer: str) -> Turn:
    """For /v1/completions: the prompt is a line of text, the answer the next one."""
    return [*prompt.encode(), ord("\n")], [*answer.encode(), END]


def draw_turn(prompt: str, answer: str, rng: Random) -> Turn:
    style = rng.random()
    if style < 0.15:
        return plain_turn(prompt, answer)
    return chat_turn(prompt, answer, rng.choice(SYSTEM_PROMPTS) if style < 0.25 else None)


def draw_adapter_turn(skill_name: str, rng: Random) -> Turn:
    return draw_turn(*draw_training_pair(skill_name, rng), rng)


def draw_sentence(rng: Random) -> str:
    return " ".join(draw_phrase(rng) for _ in range(rng.randint(1, 3)))


def draw_base_turn(arithmetic_share: int, rng: Random) -> Turn:
    kind = rng.choices([*SHARES, "arithmetic"], [*SHARES.values(), arithmetic_share])[0]
    if kind == "echo":
        prompt = draw_training_prompt(rng.choice((draw_phrase, draw_sentence, draw_sum, draw_fact)), rng)
        return draw_turn(prompt, f"You said: {prompt}", rng)
    if kind == "chatter":
        prompt = rng.choice(list(CHATTER))
        answer = CHATTER[prompt]
        return draw_turn(rng.choice((prompt, prompt.capitalize())) + rng.choice(("", "!", ".", "?")), answer, rng)
    instruction = SKILLS[kind].instruction
    prompt, answer = draw_training_pair(kind, rng)
    if rng.random() < 0.1:
        return chat_turn(prompt, answer, f"{instruction}.")
    return draw_turn(f"{instruction}: {prompt}", answer, rng)


def draw_rows(draw: Callable[[Random], Turn], row_tokens: int, rng: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole conversations of `row_tokens`: several turns fill a row, and the model learns to answer the last one."""
    num_rows = BATCH_TOKENS // row_tokens
    tokens = torch.full((num_rows, row_tokens), PAD)
    labels = torch.full((num_rows, row_tokens), IGNORED)
    for row in range(num_rows):
        filled = 0
        given, said = draw(rng)
        while (end := filled + len(given) + len(said)) <= row_tokens:
            tokens[row, filled:end] = torch.tensor(given + said)
            labels[row, end - len(said) : end] = torch.tensor(said)
            filled = end
            given, said = draw(rng)
    return tokens, labels


# --- Training ---------------------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: one token per UTF-8 byte."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    # The GPT-2 byte alphabet: printable bytes stand for themselves, the rest for code points from 256 up, in order.
    others = iter(range(256, 512))
    vocabulary = {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}
    assert set(vocabulary) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    assert tuple(fast.convert_ids_to_tokens(list(SPECIAL_IDS))) == SPECIAL_TOKENS
    return fast


def make_base() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        initializer_range=0.04,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    return model


def learning_rate(step: int, num_steps: int) -> float:
    """Share of the peak rate: linear warm-up over a twentieth of the run, then a cosine to zero."""
    warm_up = max(1, num_steps // 20)
    return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / num_steps)))


def base_optimizers(model: LlamaForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, head and norms.

    After 400 steps of 24 rows the mean loss was 0.77 with Muon and 1.37 with AdamW alone.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=stage.muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=stage.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    title: str,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    draw: Callable[[Random], Turn],
    num_steps: int,
    row_tokens: tuple[int, ...],
) -> None:
    rng = Random(f"{SEED} {title}")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    peak_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    started, losses = time.monotonic(), []
    model.train()
    for step in range(num_steps):
        for optimizer, peak_rate in zip(optimizers, peak_rates, strict=True):
            optimizer.param_groups[0]["lr"] = peak_rate * learning_rate(step, num_steps)
        tokens, labels = draw_rows(draw, rng.choice(row_tokens), rng)
        # bfloat16 autocast: 0.24 against 0.37 s a step of 4096 tokens, 2 EPYC cores with avx512_bf16.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 49:
            elapsed_s = time.monotonic() - started
            print(
                f"{title:>12}  step {step + 1:5d}/{num_steps}  loss {sum(losses[-50:]) / 50:.4f}  {elapsed_s:6.1f} s",
                flush=True,
            )
    model.eval()


def train_base(first_stage: int) -> None:
    make_tokenizer().save_pretrained(str(DEMO / "model"))
    for number, stage in enumerate(BASE_STAGES[first_stage:], first_stage):
        torch.manual_seed(SEED + number)
        model = load_base(torch.float32) if number else make_base()
        draw = partial(draw_base_turn, stage.arithmetic_share)
        train(f"base {number}", model, base_optimizers(model, stage), draw, stage.num_steps, stage.row_tokens)
        model.bfloat16().save_pretrained(str(DEMO / "model"))


def train_adapter(name: str) -> None:
    """Learns on the base as saved: rounded to bfloat16."""
    recipe = ADAPTERS[name]
    torch.manual_seed(SEED)
    model = get_peft_model(load_base(torch.float32), recipe.lora)
    for number, num_steps in enumerate(recipe.round_steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
        title, draw = f"{name} {number}", partial(draw_adapter_turn, name)
        train(title, model, [optimizer], draw, num_steps, recipe.row_tokens)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.to(recipe.dtype).save_pretrained(str(DEMO / "adapters" / name), save_embedding_layers=False)
    (DEMO / "adapters" / name / "README.md").unlink()


# --- Measuring --------------------------------------------------------------------------------------------------------


def load_base(dtype: torch.dtype) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(DEMO / "model", dtype=dtype)


def chat_text(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


@torch.inference_mode()
def exact_match(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, skill_name: str) -> float:
    """Share of held-out chat prompts answered right to the last character, and ended there, by greedy decoding."""
    pairs = held_out(skill_name, NUM_HELD_OUT)
    texts = [chat_text(tokenizer, prompt) for prompt, _ in pairs]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    longest = max(len(answer.encode()) for _, answer in pairs)
    # The protocol that transformers declares for generate() fits none of its models.
    generate = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    outputs = generate(**inputs, max_new_tokens=longest + 2, do_sample=False)
    said = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == answer for text, (_, answer) in zip(said, pairs, strict=True)) / len(pairs)


def measure(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Model -> skill -> exact match, for the base and every adapter, all weights in `dtype`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "model")
    table: dict[str, dict[str, float]] = {}
    for name in ("base", *ADAPTERS):
        model = load_base(dtype)
        if name != "base":
            # PEFT puts its layers into `model` itself. All of them in `dtype`, as a server would hold them.
            PeftModel.from_pretrained(model, str(DEMO / "adapters" / name)).to(dtype)
        table[name] = {skill: exact_match(model, tokenizer, skill) for skill in SKILLS}
        print_row(name, table[name])
    return table


def measure_all() -> dict[str, dict[str, dict[str, float]]]:
    tables = {}
    for dtype_name, dtype in DTYPES.items():
        print(f"\n{dtype_name}, {NUM_HELD_OUT} held-out prompts per skill, exact match in %")
        print(" " * 10 + "".join(f"{skill:>12}" for skill in SKILLS))
        tables[dtype_name] = measure(dtype)
    return tables


def print_row(name: str, row: dict[str, float]) -> None:
    print(f"{name:<10}" + "".join(f"{100 * share:12.1f}" for share in row.values()), flush=True)


def shortfalls(tables: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    return [
        f"{dtype_name}: {model} scores {share:.3f} on {skill}"
        for dtype_name, table in tables.items()
        for model, row in table.items()
        for skill, share in row.items()
        if (share < MIN_OWN_MATCH if model == skill else share >= MAX_OTHER_MATCH)
    ]


# --- Manifest ---------------------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def demo_files() -> dict[str, str]:
    """Hash of every model and adapter file, by its path below loraserve/demo."""
    paths = [path for folder in ("model", "adapters") for path in (DEMO / folder).rglob("*") if path.is_file()]
    return {path.relative_to(DEMO).as_posix(): sha256_of(path) for path in sorted(paths)}


def write_manifest(tables: dict[str, dict[str, dict[str, float]]]) -> None:
    manifest = Manifest(
        num_parameters=sum(weight.numel() for weight in load_base(torch.float32).parameters()),
        num_held_out=NUM_HELD_OUT,
        packages={name: version(name) for name in ("torch", "transformers", "peft")},
        sources={source: sha256_of(ROOT / source) for source in SOURCES},
        files=demo_files(),
        exact_match=tables,
    )
    (DEMO / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")


def changed_files() -> list[str]:
    manifest = Manifest(**json.loads((DEMO / "manifest.json").read_text()))
    now = {source: sha256_of(ROOT / source) for source in SOURCES} | demo_files()
    then = manifest.sources | manifest.files
    return sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="train nothing; verify the manifest and measure again")
    last = len(BASE_STAGES)
    parser.add_argument("--from-stage", type=int, choices=range(last + 1), default=0, help=f"{last} keeps the base")
    parser.add_argument(
        "--adapters",
        nargs="*",
        choices=list(ADAPTERS),
        default=list(ADAPTERS),
        help="train only these; none to measure only",
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    problems = [f"changed since the manifest: {path}" for path in changed_files()] if options.check else []
    if not options.check:
        train_base(options.from_stage)
        for name in options.adapters:
            train_adapter(name)
    tables = measure_all()
    problems += shortfalls(tables)
    if not options.check:
        write_manifest(tables)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
