import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from loraserve_kernels.backend import KernelTooLargeError
from loraserve_kernels.reference_backend import ReferenceBackend
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

from loraserve import demo
from loraserve.engine import startup
from loraserve.engine.config import EngineConfig
from loraserve.engine.errors import EngineStartError
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import (
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    ReasoningTokens,
    SamplingParams,
)
from loraserve.engine.startup import EngineParts, start
from loraserve.engine.steps.gpu_batch_builder import GpuBatchBuilder
from loraserve.models.loader import choose_dtype, load_config
from tests.support.engines import greedy, make_engine, run, to_pool
from tests.support.host_accelerator import HostAccelerator
from tests.support.tiny_models import RECURRENT, multimodal_config, random_model, save_model, save_tiny_model

MIB = 1 << 20
DEMO = Path(demo.__file__).parent / "model"


def describe(tmp_path: Path, stated: dict[str, object], **options: object) -> ModelDescription:
    return start_demo(tmp_path, stated, **options).description


def start_demo(
    tmp_path: Path,
    stated: dict[str, object],
    progress: startup.Progress = lambda *_: None,
    **options: object,
) -> EngineParts:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model", dirs_exist_ok=True))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 258], **stated}))
    settings: dict[str, object] = {
        "backend": "reference",
        "kv_cache_memory_bytes": 4 * MIB,
        "adapter_memory_bytes": 4 * MIB,
        "num_threads": 1,
    }
    config = EngineConfig(str(folder), **settings | options)
    return start(config, progress)


@pytest.mark.parametrize("token", ["<|im_end|>", "a", ""])
def test_a_stop_token_that_is_not_a_special_token_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(EngineStartError, match=rf"--adapter-chat-templates: stop token {re.escape(repr(token))} is no"):
        describe(tmp_path, {}, turn_end_tokens=("<|user|>", token))


def test_an_added_token_that_is_not_special_is_refused_as_a_stop_token(tmp_path: Path) -> None:
    """Such a token may occur in ordinary text."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|user|>"
    folder = Path(shutil.copytree(DEMO, tmp_path / "other"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineStartError, match=r"stop token '<\|user\|>' is not a special token"):
        describe(tmp_path, {}, tokenizer=str(folder), turn_end_tokens=("<|user|>",))


def test_a_stop_token_outside_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|more {number}|>" for number in range(100)]})
    tokenizer.save_pretrained(tmp_path / "other")
    refused = r"stop token '<\|more 99\|>' has id 360, but the model's token ids are 0 to \d+"
    with pytest.raises(EngineStartError, match=refused):
        describe(tmp_path, {}, tokenizer=str(tmp_path / "other"), turn_end_tokens=("<|user|>", "<|more 99|>"))


def test_turn_end_tokens_are_allowed_only_where_the_grammar_may_end(tmp_path: Path) -> None:
    parts = start_demo(tmp_path, {}, turn_end_tokens=("<|user|>", "<|pad|>"))
    assert parts.description.turn_end_ids == {"<|user|>": 257, "<|pad|>": 260}
    eos, ends, closing, special = 259, {257, 260}, 256, range(256, 261)

    def may_come(text: str, reasoning: ReasoningTokens | None = None) -> set[int]:
        compiled = parts.grammars.compile(Grammar(GrammarKind.REGEX, "[a-z]+!?", reasoning)).result().copy()
        for token_id in [*([closing] if reasoning and text else []), *text.encode()]:
            assert compiled.take(token_id), compiled.error
        mask = np.unpackbits(compiled.mask(), bitorder="little")
        return {token_id for token_id in special if mask[token_id]}

    assert may_come("") == set()
    assert may_come("ab") == {eos, 258} | ends
    thinking = ReasoningTokens(None, closing)
    assert may_come("", thinking) == {closing}
    assert may_come("ab", thinking) == {eos, 258} | ends
    ended = parts.grammars.compile(Grammar(GrammarKind.REGEX, "[a-z]+!?")).result().copy()
    assert all(ended.take(token_id) for token_id in (*b"ab", 260))
    assert ended.is_complete


@pytest.mark.parametrize("min_tokens", [0, 5])
@pytest.mark.parametrize("reasoning", [None, ReasoningTokens(None, 256)])
def test_a_constrained_output_ends_with_a_turn_end_token_no_sooner_than_allowed(
    min_tokens: int, reasoning: ReasoningTokens | None
) -> None:
    """Although the logit bias makes the model prefer that token at every step."""
    engine = make_engine(DEMO, tokenizer=None, backend="reference", turn_end_tokens=("<|pad|>",))
    params = SamplingParams(
        max_tokens=20,
        temperature=0.0,
        min_tokens=min_tokens,
        stop_token_ids=(260,),
        logit_bias={260: 100.0, 256: 90.0},
        grammar=Grammar(GrammarKind.REGEX, "[a-z]+", reasoning),
    )
    answer = run(engine, [EngineRequest("0", [1, 2, 3], params)])["0", 0]
    *text, end = answer.token_ids[1 if reasoning else 0 :]
    assert (end, answer.finish_reason, answer.stop_token_id) == (260, FinishReason.STOP, 260)
    assert bytes(text).isalpha()
    assert len(answer.token_ids) == max(min_tokens, 2 + (reasoning is not None)) + (min_tokens > 0)


STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 77}


@pytest.mark.parametrize(
    ("stated", "options", "expected"),
    [
        ({}, {}, {}),
        ({"do_sample": True, "bos_token_id": 3}, {}, {}),
        (STATED, {}, STATED),
        (STATED, {"generation_config": "vllm"}, {}),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(
    tmp_path: Path, stated: dict[str, object], options: dict[str, object], expected: dict[str, object]
) -> None:
    description = describe(tmp_path, stated, **options)
    assert description.default_sampling == expected
    assert {258, 259} <= set(description.eos_token_ids), "what ends a text is no sampling default"


def test_the_description_has_the_default_pooling_and_the_hidden_size(tmp_path: Path) -> None:
    (tmp_path / "model/1_Pooling").mkdir(parents=True)
    (tmp_path / "model/1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    description = describe(tmp_path, {})
    assert (description.default_pooling, description.hidden_size) == (Pooling.MEAN, 256)
    (tmp_path / "model/modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    description = describe(tmp_path, {})
    assert description.default_pooling is None
    assert any("modules.json has unsupported modules (Dense)" in note for note in description.notes)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """transformers would initialize them randomly and only warn."""
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineStartError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight and 1 more"):
        start(EngineConfig(str(folder), backend="reference"), lambda *_: None)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_model_without_a_head_can_embed(tmp_path: Path, architecture: str) -> None:
    """Saved as sentence-transformers does. A model whose head is tied to its token embeddings lacks none."""
    save_tiny_model(architecture, tmp_path / "causal")
    body = AutoModel.from_pretrained(tmp_path / "causal").eval()
    body.save_pretrained(tmp_path / "headless")
    engine = make_engine(tmp_path / "headless", tokenizer=str(tmp_path / "causal/tokenizer"))
    description = engine.describe()
    assert description.is_headless == (architecture == "llama")
    assert (startup.HEADLESS_NOTE in description.notes) == description.is_headless
    prompt = list(range(1, 30))
    answer = run(engine, [to_pool("p", prompt)])["p", 0]
    assert answer.pooled is not None, answer.error
    expected = body(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(np.frombuffer(answer.pooled, np.float32), expected, atol=1e-4 * abs(expected).max())


def test_cache_on_an_accelerator_is_sized_by_the_memory_that_a_step_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = HostAccelerator(free=100 * MIB, peak=10 * MIB)
    monkeypatch.setattr(startup, "accelerator_of", lambda _: accelerator)
    phases: list[str] = []
    parts = start_demo(
        tmp_path, {}, lambda phase, *_: phases.append(phase), kv_cache_memory_bytes=None, max_num_batched_tokens=64
    )
    assert isinstance(parts.builder, GpuBatchBuilder)
    assert accelerator.num_recordings == 0, "the reference backend reads tensors on the host"
    assert "compiling kernels" in phases
    block_bytes = 4 * MIB // start_demo(tmp_path / "host", {}).description.num_blocks
    assert parts.description.num_blocks * block_bytes < 0.4 * (90 - 2 * 10) * MIB


def test_too_little_memory_for_a_step_names_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = HostAccelerator(free=100 * MIB, peak=60 * MIB)
    monkeypatch.setattr(startup, "accelerator_of", lambda _: accelerator)
    with pytest.raises(EngineStartError, match=r"--max-num-batched-tokens.*--gpu-memory-utilization"):
        start_demo(tmp_path, {}, max_num_batched_tokens=64)


def test_running_out_of_memory_names_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(startup.loader, "load_model", load)
    with pytest.raises(EngineStartError, match=r"--max-model-len, .*--gpu-memory-utilization .*\(CUDA out of memory"):
        start_demo(tmp_path, {})


def test_a_kernel_that_does_not_fit_is_refused_with_another_dtype_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> None:
        raise KernelTooLargeError("attention with heads of 512 in float32 does not fit cuda:0")

    monkeypatch.setattr(startup.CausalModel, "prepare", prepare)
    with pytest.raises(EngineStartError, match=r"heads of 512 in float32 does not fit cuda:0: choose --dtype bfloat16"):
        start_demo(tmp_path, {})


def test_notes_of_prepare_are_kept_and_a_gpu_failure_is_a_start_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup.CausalModel, "prepare", lambda self, *_: self.notes.append("fused layers: not used"))
    assert "fused layers: not used" in describe(tmp_path / "first", {}).notes

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(startup.CausalModel, "prepare", fail)
    with pytest.raises(EngineStartError, match=r"the GPU failed; starting again may help .*illegal memory access"):
        start_demo(tmp_path / "second", {})


def test_a_missing_device_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="--device cuda:99 "):
        start_demo(tmp_path, {}, device="cuda:99")


def test_a_float8_cache_has_one_byte_per_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    plain, small = (
        start_demo(tmp_path / choice, {}, dtype="float32", kv_cache_dtype=choice, max_num_batched_tokens=64)
        for choice in ("auto", "fp8")
    )
    assert (plain.description.kv_cache_dtype, small.description.kv_cache_dtype) == ("float32", "float8_e4m3fn")
    assert small.description.dtype == "float32"
    assert 0 <= small.description.num_blocks - 4 * plain.description.num_blocks < 4


def test_a_float8_cache_is_refused_on_a_cpu_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup.loader, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(EngineStartError, match=r"--kv-cache-dtype fp8 needs an NVIDIA GPU of compute capability 8\.9"):
        start_demo(tmp_path, {}, kv_cache_dtype="fp8")


def test_int8_quantization_is_refused_on_a_gpu_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    monkeypatch.setattr(startup.loader, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        EngineStartError, match=r"--quantization int8 is supported on CPUs only, but the device is .*--device cpu"
    ):
        start_demo(tmp_path, {}, quantization="int8")


@pytest.mark.parametrize(
    ("quantization", "remedy"),
    [
        ("none", ", or shrink the weights with --quantization int8 or int4"),
        ("int8", ", or shrink the weights with --quantization int4"),
        ("int4", ""),
    ],
)
def test_a_model_that_leaves_no_memory_is_refused_with_the_quantizations_that_shrink_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, remedy: str
) -> None:
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: MIB)
    refused = rf"too few for a KV cache: use a smaller model or more memory{remedy}$"
    with pytest.raises(EngineStartError, match=refused):
        start_demo(tmp_path, {}, kv_cache_memory_bytes=None, quantization=quantization)


@pytest.mark.parametrize(("requested", "num_slabs"), [(5 * MIB, 1), (0, 0)])
def test_a_device_has_a_host_tier_of_the_requested_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: int, num_slabs: int
) -> None:
    locked: list[int] = []
    host_buffer = HostAccelerator.host_buffer
    monkeypatch.setattr(
        HostAccelerator, "host_buffer", lambda self, size: (locked.append(size), host_buffer(self, size))[1]
    )
    monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    parts = start_demo(tmp_path, {}, adapter_host_memory_bytes=requested, max_num_batched_tokens=64)
    assert locked.count(5 * MIB) == num_slabs
    assert parts.description.host_tier_bytes == requested
    notes = [note for note in parts.description.notes if "page-locked" in note]
    assert len(notes) == num_slabs
    assert all(note.startswith(f"{8 * MIB} bytes") for note in notes), "of what torch locks for it"


def test_a_host_tier_is_refused_on_a_cpu_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup.loader, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(EngineStartError, match="--adapter-host-memory-bytes 1 is for GPUs"):
        start_demo(tmp_path, {}, adapter_host_memory_bytes=1)


def test_speculative_decoding_needs_a_backend_that_computes_extra_rows_for_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe(tmp_path / "cpu", {}, backend="cpu").num_speculative_tokens == 16
    assert describe(tmp_path / "none", {}, backend="cpu", num_speculative_tokens=0).num_speculative_tokens == 0
    assert describe(tmp_path / "few", {}, backend="cpu", num_speculative_tokens=2).num_speculative_tokens == 2
    assert describe(tmp_path / "reference", {}).num_speculative_tokens == 0
    monkeypatch.setattr(startup.loader, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(EngineStartError, match=r"--num-speculative-tokens is 3, .* with the reference backend"):
        start_demo(tmp_path / "refused", {}, num_speculative_tokens=3)
    with pytest.raises(
        EngineStartError, match="is 3, but speculative decoding is not available for this model in float16"
    ):
        start_demo(tmp_path / "float16", {}, backend="cpu", dtype="float16", num_speculative_tokens=3)


def start_saved(folder: Path, **options: object) -> EngineParts:
    """For a tiny model that is saved there."""
    settings: dict[str, object] = {"kv_cache_memory_bytes": 4 * MIB, "adapter_memory_bytes": 4 * MIB, "num_threads": 1}
    return start(EngineConfig(str(folder), tokenizer=str(folder / "tokenizer"), **settings | options), lambda *_: None)


def test_drafts_are_refused_for_a_model_with_recurrent_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("lfm2", tmp_path)
    assert start_saved(tmp_path, backend="cpu").description.num_speculative_tokens == 0
    monkeypatch.setattr(startup.loader, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        EngineStartError,
        match=r"--num-speculative-tokens is 4, but .* is not available for this model in .*: omit the flag",
    ):
        start_saved(tmp_path, backend="cpu", num_speculative_tokens=4)


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5", "granite_hybrid"])
def test_recurrent_layers_are_refused_on_a_gpu_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    save_tiny_model(architecture, tmp_path)
    monkeypatch.setattr(startup.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(startup.torch.version, "cuda", "13.0")
    monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    monkeypatch.setattr(startup.loader, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        EngineStartError, match=r"has recurrent layers, which run on CPUs alone, not on cuda.*: start with --device cpu"
    ):
        start_saved(tmp_path, device="cuda", backend="reference", dtype="float32")


def test_a_model_that_is_not_decoder_only_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    save_model(AutoModelForSeq2SeqLM.from_config(config), tmp_path)
    with pytest.raises(EngineStartError, match="model_type 't5' cannot be served: it is not a decoder-only model"):
        make_engine(tmp_path)


def test_a_model_whose_prompts_see_ahead_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    with pytest.raises(EngineStartError, match="model_type 'paligemma' cannot be served: tokens of a prompt attend to"):
        make_engine(tmp_path)


def test_a_config_of_the_wrong_types_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "x"}))
    with pytest.raises(EngineStartError, match="cannot read the config of"):
        make_engine(tmp_path)


def test_a_dtype_that_only_the_whole_models_config_states_counts(tmp_path: Path) -> None:
    save_model(random_model(multimodal_config()).bfloat16(), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["dtype"]
    assert config["dtype"] == "bfloat16"
    path.write_text(json.dumps(config))
    chosen = choose_dtype("auto", load_config(str(tmp_path), None), torch.device("cuda"), ReferenceBackend())
    assert chosen is torch.bfloat16


@pytest.mark.parametrize("name", ["chat_template.json", "chat_template.jinja"])
def test_the_chat_template_may_be_the_processors(tmp_path: Path, name: str) -> None:
    """A tokenizer's own has precedence."""
    save_tiny_model("llama", tmp_path)
    own = make_engine(tmp_path).describe().chat_template
    folder = tmp_path / "tokenizer"
    for path in folder.glob("chat_template*"):
        path.unlink()
    assert make_engine(tmp_path).describe().chat_template is None
    template = "{{ messages[0].content }}"
    (folder / name).write_text(json.dumps({"chat_template": template}) if name.endswith(".json") else template)
    assert make_engine(tmp_path).describe().chat_template == template
    save_tiny_model("llama", tmp_path)
    assert make_engine(tmp_path).describe().chat_template == own


def test_a_model_with_recurrent_layers_alone_is_refused(tmp_path: Path) -> None:
    config = RECURRENT["lfm2"]()
    config.layer_types = ["conv"] * config.num_hidden_layers
    save_model(random_model(config), tmp_path)
    with pytest.raises(EngineStartError, match="all of its layers are recurrent; at least one must be attention"):
        start_saved(tmp_path)


def test_sequences_are_limited_to_the_recurrent_states_that_fit(tmp_path: Path) -> None:
    save_tiny_model("qwen3_5", tmp_path)
    parts = start_saved(tmp_path, kv_cache_memory_bytes=200_000, max_num_seqs=100)
    state_bytes = sum(state[0].nbytes for state in parts.runner._states)
    most = 100_000 // state_bytes
    assert {len(state) for state in parts.runner._states} == {most}
    assert parts.num_state_slots == most
    assert 1 < parts.description.max_num_seqs < min(most, 100)
    note = f"max_num_seqs lowered from 100 to {parts.description.max_num_seqs}: each sequence has a recurrent state of "
    assert [each for each in parts.description.notes if each.startswith(note)] == [
        f"{note}{state_bytes} bytes (--kv-cache-memory-bytes)"
    ]


def test_an_engine_runs_no_more_sequences_than_have_recurrent_states(tmp_path: Path) -> None:
    save_tiny_model("qwen3_5", tmp_path)
    engine = make_engine(tmp_path, kv_cache_memory_bytes=100_000, max_num_seqs=100, block_size=8)
    most = engine.describe().max_num_seqs
    for i in range(most + 3):
        engine.add_request(greedy(f"r{i}", [i], 5))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (most, 3)
    assert len(run(engine)) == most + 3


def tokenizer_with_gaps(folder: Path, missing: set[int]) -> Path:
    """The demo model's tokenizer without the tokens at these ids. Special tokens keep theirs, which are the last."""
    path = Path(demo.__file__).parent / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    left = {token: token_id for token, token_id in vocab.items() if token_id not in missing}
    tokenizer["model"]["vocab"] = left | special
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes(path.with_name("tokenizer_config.json").read_bytes())
    return folder


def test_gaps_in_token_ids_do_not_change_the_vocab_size(tmp_path: Path) -> None:
    whole = start_demo(tmp_path / "whole", {}).description.vocab_size
    folder = tokenizer_with_gaps(tmp_path / "tokenizer", {7})
    assert start_demo(tmp_path / "gaps", {}, tokenizer=str(folder)).description.vocab_size == whole


def test_grammars_of_a_tokenizer_with_gaps_allow_its_ends_and_no_missing_ids(tmp_path: Path) -> None:
    missing = {7, 8, 9, 10, 11}
    folder = tokenizer_with_gaps(tmp_path / "tokenizer", missing)
    parts = start_demo(tmp_path / "model", {}, tokenizer=str(folder))
    grammar = Grammar(GrammarKind.REGEX, r"(.|\n)*")
    allowed = np.unpackbits(parts.grammars.compile(grammar).result().mask(), bitorder="little")
    assert {258, 259} <= set(np.flatnonzero(allowed)), "what ends a text"
    assert not missing & set(np.flatnonzero(allowed)), "ids without a text"


def test_an_eos_id_that_the_tokenizer_lacks_is_ignored(tmp_path: Path) -> None:
    """A config may list its model family's EOS ids, whatever tokenizer the model was trained with."""
    parts = start_demo(tmp_path, {"eos_token_id": [259, 128_001]})
    assert parts.description.eos_token_ids == [259]
    assert parts.grammars.compile(Grammar(GrammarKind.REGEX, "a+")).result().error == ""
