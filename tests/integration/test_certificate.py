"""The parity certificate against a real engine, a real PEFT and a planted difference."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from loraserve_adapters.packed import PackedTable
from loraserve_adapters.packed_file import PackedFileWriter, new_packed_file, read_packed, write_packed
from loraserve_adapters.trained_tokens import ROWS
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from loraserve.api.routes import certificates
from loraserve.api.schemas.certificates import CertificateState
from loraserve.control import control_plane
from loraserve.control.contents import certificate_child
from loraserve.control.contents.certificate import (
    TIMEOUT_S,
    Certificate,
    CertificateJob,
    CertificateStatus,
    Certifier,
    skipped,
)
from loraserve.control.declared import Declared
from loraserve.control.ingest.processes import Ingest
from loraserve.engine.adapters.rows import AdapterRows
from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.models.causal_model import CausalModel
from loraserve.serving.engine_client import EngineClient
from loraserve.store.upload_session import UploadState
from tests.support.engines import make_engine
from tests.support.quantized_checkpoints import save_nf4
from tests.support.tiny_adapters import load_classifier, save_adapters
from tests.support.tiny_models import (
    model_with_tower,
    multimodal_config,
    random_model,
    save_model,
    save_tiny_model,
    text_only,
)
from tests.support.uploads import UploadBench
from tests.zoo.artifacts import CONFIG, WEIGHTS

MEASURE = (sys.executable, "-m", "loraserve.control.contents.certificate_child")
DIE = (sys.executable, "-c", "raise SystemExit(1)")


def save_with_tower(folder: Path) -> PreTrainedModel:
    """The text-only class is served."""
    model = model_with_tower(is_tied=True)
    save_model(model, folder)
    return model


def save_tower_beside_text_only(folder: Path) -> PreTrainedModel:
    """The class with the tower is served; returns the text-only one."""
    model = random_model(multimodal_config())
    save_model(model, folder)
    return text_only(model)


SAVED_OTHERWISE: dict[str, Callable[[Path], PreTrainedModel]] = {
    "nf4": save_nf4,
    "with_tower": save_with_tower,
    "text_only": save_tower_beside_text_only,
}


class Published:
    """A tiny model and one uploaded adapter of it."""

    def __init__(
        self,
        folder: Path,
        adapter: str,
        architecture: str = "llama",
        config: LoraConfig | None = None,
        *,
        is_headless: bool = False,
        num_labels: int | None = None,
        dtype: str = "float32",
        has_row_copies: bool = False,
    ) -> None:
        """config: None = the adapter's in `adapter_configs`. is_headless: trained on the model without its head.
        num_labels: set for a classifier. has_row_copies: its token rows are also saved for the tied `lm_head`."""
        save = SAVED_OTHERWISE.get(architecture, partial(save_tiny_model, architecture))
        model = save(folder / "model")
        configs = None if config is None else {adapter: config}
        trained = model.base_model if is_headless else model
        if num_labels is not None:
            trained = load_classifier(folder / "model", num_labels)
        paths = save_adapters(trained, folder / "adapters", configs)
        if has_row_copies:
            tensors = load_file(paths[adapter] / WEIGHTS)
            tensors[f"base_model.model.lm_head.{ROWS}"] = tensors[f"base_model.model.model.embed_tokens.{ROWS}"].clone()
            save_file(tensors, paths[adapter] / WEIGHTS)
        self.engine = EngineConfig(
            model=str(folder / "model"), tokenizer=str(folder / "model" / "tokenizer"), dtype=dtype, device="cpu"
        )
        layout = make_engine(folder / "model", dtype=dtype).describe().layout
        self.bench = UploadBench(folder / "data", layout=layout)
        files = {name: (paths[adapter] / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        session = asyncio.run(self.bench.send(files))
        assert session.state is UploadState.READY, session.report
        assert session.result is not None
        self.digest = session.result.digest
        self.packed = self.bench.ingest.packed_path(self.digest)

    def certifier(self, command: Sequence[str] = MEASURE, timeout_s: float = TIMEOUT_S) -> Certifier:
        return Certifier(
            self.bench.blobs,
            self.bench.ingest,
            base_fingerprint=lambda: self.bench.layout.fingerprint,
            engine=self.engine,
            timeout_s=timeout_s,
            command=command,
        )

    def certify(self, command: Sequence[str] = MEASURE, timeout_s: float = TIMEOUT_S) -> Certificate:
        certificate = asyncio.run(self.certifier(command, timeout_s).certify(self.digest))
        assert certificate is not None
        return certificate

    def blob(self) -> Path:
        folder = self.bench.blobs.folder(self.digest)
        assert folder is not None
        return folder

    def job(self, **changes: object) -> CertificateJob:
        job = CertificateJob(
            digest=self.digest,
            blob=str(self.blob()),
            packed_path=str(self.packed),
            base_fingerprint=self.bench.layout.fingerprint,
            engine=self.engine,
        )
        return msgspec.structs.replace(job, **changes)

    def forget_certificates(self) -> None:
        for stored in self.blob().glob("certificate-*"):
            stored.unlink()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("certificate"), "patterns64")


def test_a_correctly_served_adapter_agrees_with_peft(published: Published) -> None:
    certificate = published.certify()
    assert certificate.status is CertificateStatus.AGREES, certificate
    assert certificate.relative_difference is not None
    assert 0 < certificate.relative_difference < 1e-5
    assert certificate.num_positions == 4
    assert published.certifier().of(published.digest) == certificate


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_are_compared_with_peft_on_the_rounded_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """PEFT on the unrounded base would not agree."""
    published = Published(tmp_path, "patterns64")
    job = published.job(engine=replace(published.engine, quantization=quantization))
    certificate = measure(job)
    assert certificate.status is CertificateStatus.AGREES, certificate
    monkeypatch.setattr("loraserve.models.quantized_weights.round_weights", lambda *_: None)
    assert measure(job).status is CertificateStatus.DIFFERS


def test_an_nf4_base_is_measured_as_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = Published(tmp_path, "patterns64", architecture="nf4")
    for quantization in ("none", "int8"):
        job = published.job(engine=replace(published.engine, quantization=quantization))
        assert measure(job).status is CertificateStatus.AGREES
    monkeypatch.setattr("loraserve.models.quantized_weights.round_weights", lambda *_: None)
    assert measure(published.job()).status is CertificateStatus.DIFFERS


def answering(certificate: Certificate) -> tuple[str, ...]:
    """Replaces `MEASURE`: a command that prints the certificate."""
    return sys.executable, "-c", f"print(); print({msgspec.json.encode(certificate).decode()!r})"


def test_each_quantization_has_its_own_certificate(tmp_path: Path) -> None:
    published = Published(tmp_path, "patterns64")
    plain = skipped(published.job(), "plain")
    assert published.certify(answering(plain)) == plain
    published.engine = replace(published.engine, quantization="int8")
    assert published.certifier().of(published.digest) is None
    rounded = skipped(published.job(), "rounded")
    assert published.certify(answering(rounded)) == rounded
    published.engine = replace(published.engine, quantization="none")
    assert published.certifier().of(published.digest) == plain


def test_peft_copies_of_base_weights_are_ignored_if_the_base_is_rounded(tmp_path: Path) -> None:
    config = LoraConfig(r=8, lora_alpha=24, target_modules=["q_proj", "lm_head"])
    published = Published(tmp_path, "head", config=config)
    assert any("lora_" not in name for name in load_file(published.blob() / WEIGHTS))
    certificate = measure(published.job(engine=replace(published.engine, quantization="int4")))
    assert certificate.status is CertificateStatus.AGREES, certificate


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Published:
    targets = r"layers\.[01]\..*(q|up)_proj"
    config = LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type="FEATURE_EXTRACTION")
    return Published(tmp_path_factory.mktemp("headless"), "embeds", config=config, is_headless=True)


def test_an_adapter_of_a_headless_model_agrees_with_peft_on_its_body(headless: Published) -> None:
    certificate = headless.certify()
    assert certificate.status is CertificateStatus.AGREES, certificate
    assert certificate.relative_difference is not None
    assert 0 < certificate.relative_difference < 1e-5


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_labels"),
    [("llama", "float32", 1), ("qwen3", "bfloat16", 1), ("llama", "float32", 9)],
)
def test_a_classifier_agrees_with_peft(architecture: str, dtype: str, num_labels: int, tmp_path: Path) -> None:
    """With another head than PEFT saved, or another LoRA, it would not."""
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS")
    published = Published(tmp_path, "intent", architecture, config, num_labels=num_labels, dtype=dtype)
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    assert certificate.num_positions == 4
    packed = read_packed(published.packed)
    head = packed.table.head
    assert head is not None
    start = head.offset * torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    end = start + 4 * num_labels * head.hidden_size
    for name, changed in {"head": slice(start, end), "lora": slice(0, start)}.items():
        payload = np.array(packed.payload)
        of_dtype = np.float32 if name == "head" or dtype == "float32" else np.uint16
        values = payload[changed].view(of_dtype)
        values[:] = np.roll(values, 1) if of_dtype is np.uint16 else values * 1.05
        write_packed(replace(packed, payload=payload), wrong := tmp_path / f"{name}.packed")
        assert measure(published.job(packed_path=str(wrong))).status is CertificateStatus.DIFFERS, name


def test_an_adapters_chat_template_does_not_affect_its_certificate(published: Published, tmp_path: Path) -> None:
    blob = shutil.copytree(published.blob(), tmp_path / "blob")
    fields = json.loads((blob / CONFIG).read_text())
    (blob / CONFIG).write_text(json.dumps(fields | {"chat_template": "chatml"}))
    certificate = measure(published.job(blob=str(blob)))
    assert certificate.status is CertificateStatus.AGREES, certificate


def test_an_activated_adapter_agrees_with_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it applied to the whole prompt, it would not."""
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[7, 9]
    )
    activated = Published(tmp_path, "judge", config=config)
    certificate = measure(activated.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    monkeypatch.setattr(Engine, "_adapter_start", lambda *_: 0)
    assert measure(activated.job()).status is CertificateStatus.DIFFERS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dora_adapter_agrees_with_peft(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its magnitudes it would not."""
    config = LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"])
    published = Published(tmp_path, "dora", config=config, dtype=dtype)
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    monkeypatch.setattr(AdapterRows, "place", without_magnitudes(AdapterRows.place))
    assert measure(published.job()).status is CertificateStatus.DIFFERS


@pytest.mark.parametrize(
    ("architecture", "dtype", "has_row_copies"), [("llama", "float32", False), ("qwen3", "bfloat16", True)]
)
def test_an_adapter_with_trained_token_rows_agrees_with_peft(
    architecture: str, dtype: str, has_row_copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its rows were added to the base's rows, it would not."""
    config = LoraConfig(r=8, target_modules=["q_proj"], trainable_token_indices=[200, 3, 17])
    published = Published(tmp_path, "tokens", architecture, config, dtype=dtype, has_row_copies=has_row_copies)
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    monkeypatch.setattr(CausalModel, "finish_adapter", lambda *_: None)
    assert measure(published.job()).status is CertificateStatus.DIFFERS


@pytest.mark.parametrize(
    ("architecture", "dtype", "saved", "ensures"),
    [
        ("llama", "float32", ["lm_head"], False),
        ("qwen3", "bfloat16", ["embed_tokens"], True),
        ("nf4", "float32", ["embed_tokens", "lm_head"], False),
    ],
)
def test_an_adapter_with_own_tables_agrees_with_peft(
    architecture: str, dtype: str, saved: list[str], ensures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the base's tables it would not. qwen3's are tied, and so are the adapter's."""
    config = LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=ensures)
    published = Published(tmp_path, "tables", architecture, config, dtype=dtype)
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    monkeypatch.setattr(AdapterRows, "_own_table", lambda *_: None)
    assert measure(published.job()).status is CertificateStatus.DIFFERS


def test_an_own_table_that_peft_leaves_to_the_base_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
    published = Published(tmp_path, "tables", config=config)
    fields = certificate_child._config_fields
    monkeypatch.setattr(certificate_child, "_own_tables", lambda *_: ["lm_head"])
    monkeypatch.setattr(certificate_child, "_config_fields", lambda job: fields(job) | {"modules_to_save": None})
    assert measure(published.job()).status is CertificateStatus.DIFFERS


def test_a_headless_adapter_with_its_own_embedding_agrees_with_peft(tmp_path: Path) -> None:
    config = LoraConfig(
        r=8, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="FEATURE_EXTRACTION"
    )
    published = Published(tmp_path, "tables", config=config, is_headless=True)
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_classifier_with_its_own_embedding_agrees_with_peft(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoraConfig(
        r=8,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        task_type="SEQ_CLS",
        ensure_weight_tying=architecture == "qwen3",
    )
    published = Published(tmp_path, "intent", architecture, config, num_labels=3)
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    monkeypatch.setattr(AdapterRows, "_own_table", lambda *_: None)
    assert measure(published.job()).status is CertificateStatus.DIFFERS


OF_OTHER_CLASS = {
    "pattern": LoraConfig(
        r=8,
        target_modules=r"model\.(language_model|visual|layers\.[01])\..*(up|q|out)_proj",
        rank_pattern={r"^model\.(language_model\.)?layers\.1\..*": 3},
    ),
    "tokens": LoraConfig(r=8, use_dora=True, target_modules=["q_proj"], trainable_token_indices=[200, 3, 17]),
    "tables": LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True),
    "all_linear": LoraConfig(r=8, target_modules="all-linear"),
}


@pytest.mark.parametrize("architecture", ["with_tower", "text_only"])
def test_adapters_of_the_class_that_is_not_served_agree_with_peft(architecture: str, tmp_path: Path) -> None:
    """With the names of the class that is served, PEFT would not find their modules."""
    for name, config in OF_OTHER_CLASS.items():
        published = Published(tmp_path / name, name, architecture, config)
        certificate = measure(published.job())
        assert certificate.status is CertificateStatus.AGREES, (name, certificate)


def test_a_classifier_of_the_class_that_is_not_served_agrees_with_peft(tmp_path: Path) -> None:
    config = LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="SEQ_CLS")
    published = Published(tmp_path, "intent", "with_tower", config, num_labels=3)
    assert any("model.language_model." in name for name in load_file(published.blob() / WEIGHTS))
    certificate = measure(published.job())
    assert certificate.status is CertificateStatus.AGREES, certificate


def test_a_headless_adapter_of_the_class_that_is_not_served_agrees_unless_that_has_a_tower(tmp_path: Path) -> None:
    """PEFT can then not be given the names of that class."""
    config = LoraConfig(r=8, target_modules=["q_proj"], task_type="FEATURE_EXTRACTION")
    text_only = Published(tmp_path / "text_only", "embeds", "text_only", config, is_headless=True)
    certificate = measure(text_only.job())
    assert certificate.status is CertificateStatus.AGREES, certificate
    with_tower = Published(tmp_path / "with_tower", "embeds", "with_tower", config, is_headless=True)
    with pytest.raises(certificate_child.Skipped, match="without its head"):
        measure(with_tower.job())


@pytest.mark.parametrize("of", ["published", "headless"])
def test_a_wrong_packed_file_differs(of: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    published: Published = request.getfixturevalue(of)
    packed = read_packed(published.packed)
    payload = np.array(packed.payload).view(np.float32)
    payload *= 1.05
    wrong = tmp_path / "wrong.packed"
    with new_packed_file(wrong) as descriptor:
        writer = PackedFileWriter(descriptor, packed.table, packed.size_bytes)
        writer.write(0, payload.view(np.uint8).data)
        writer.finish(packed.digest)
    assert measure(published.job(packed_path=str(wrong))).status is CertificateStatus.DIFFERS


def without_magnitudes(place: Callable[..., None]) -> Callable[..., None]:
    def place_plain(rows: AdapterRows, slot: int, start: int, packed: PackedTable) -> None:
        place(rows, slot, start, replace(packed, offset_magnitude=np.full_like(packed.offset_magnitude, -1)))

    return place_plain


def measure(job: CertificateJob) -> Certificate:
    """Like the child, but without importing torch, transformers and PEFT again, which takes 6 s of CPU time."""
    num_threads = torch.get_num_threads()
    try:
        with torch.enable_grad():  # restores the grad mode, which the child turns off
            return certificate_child.measure(job)
    finally:
        torch.set_num_threads(num_threads)


def run_child(job: CertificateJob, script: str) -> Certificate:
    """The child's `main`, with `script` run before it."""

    async def run() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"{script}\nfrom loraserve.control.contents.certificate_child import main\nmain()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await process.communicate(msgspec.json.encode(job))
        return answer

    return msgspec.json.decode(asyncio.run(run()).strip(), type=Certificate)


def send_to_other_experts(job: CertificateJob, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    """Measures as if rounding had routed a token of the first prompt to other experts."""
    compare, prompts = certificate_child._compare, []

    def compare_changed(
        job: CertificateJob, reference: certificate_child.Reference, sample: certificate_child.Sample
    ) -> Certificate:
        prompts.append(sample.prompt)
        if len(prompts) == 1:
            sample.rows = [row.roll(1) for row in sample.rows]
        return compare(job, reference, sample)

    with monkeypatch.context() as changed:
        changed.setattr(certificate_child, "_compare", compare_changed)
        return measure(job)


def test_for_a_mixture_of_experts_one_agreeing_prompt_is_enough(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_experts = Published(tmp_path, "rank1", "mixtral")
    assert send_to_other_experts(of_experts.job(), monkeypatch).status is CertificateStatus.AGREES
    assert send_to_other_experts(published.job(), monkeypatch).status is CertificateStatus.DIFFERS


def test_is_skipped_if_peft_is_not_installed(published: Published) -> None:
    without = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'peft' else f(n, *a)"
    )
    certificate = run_child(published.job(), without)
    assert (certificate.status, certificate.reason) == (CertificateStatus.SKIPPED, "peft is not installed")


def test_is_skipped_if_peft_scales_rslora_on_experts_differently_than_in_training(tmp_path: Path) -> None:
    """An expert's gate and up are one weight now: PEFT adds their ranks and takes the root of the sum."""
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "use_rslora": True}))
    save_file({"base_model.model.mlp.experts.0.gate_proj.lora_A.weight": torch.zeros(4, 8)}, tmp_path / WEIGHTS)
    engine = EngineConfig(model="m")
    job = CertificateJob(digest="d", blob=str(tmp_path), packed_path="", base_fingerprint="", engine=engine)
    with pytest.raises(certificate_child.Skipped, match="rsLoRA"):
        certificate_child._reference(job, torch.float32, "model")


def test_is_skipped_if_there_is_too_little_memory(published: Published) -> None:
    with pytest.raises(certificate_child.Skipped, match="times the base's"):
        measure(published.job(memory_factor=1e9))


def test_is_skipped_if_a_gpu_serves_but_not_if_one_is_merely_present(published: Published) -> None:
    with_gpu = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 1"
    assert run_child(published.job(), with_gpu).status is CertificateStatus.AGREES
    on_gpu = run_child(published.job(engine=replace(published.engine, device="cuda:0")), with_gpu)
    assert on_gpu.reason == "it is measured on CPUs only"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_certifier_replaces_auto_with_the_device_that_serves(device: str) -> None:
    serving = cast(EngineClient, SimpleNamespace(model=SimpleNamespace(device=device)))
    declared = cast(Declared, SimpleNamespace(blobs=None))
    certifier = control_plane._certifier(declared, serving, cast(Ingest, None), EngineConfig(model="m", device="auto"))
    assert certifier._engine.device == device


def test_a_measurement_that_dies_or_hangs_is_skipped(published: Published) -> None:
    published.forget_certificates()
    died = published.certify(DIE)
    assert died.reason == "the measurement failed; the server's log says why"
    hung = published.certify((sys.executable, "-c", "import time; time.sleep(600)"), timeout_s=0.5)
    assert hung.reason == "it took longer than 0.5 s"
    assert published.certifier().of("0" * 64) is None


def test_queued_digests_are_measured_in_the_background(published: Published) -> None:
    async def run() -> None:
        certifier = published.certifier(DIE)
        task = asyncio.create_task(certifier.run())
        certifier.queue("0" * 64)
        for _ in range(3):
            certifier.queue(published.digest)
        assert certifier._waiting.qsize() == 2
        async with asyncio.timeout(30):
            while certifier._queued:
                await asyncio.sleep(0.01)
        assert certifier.of(published.digest) is not None
        task.cancel()

    published.forget_certificates()
    asyncio.run(run())


def test_reading_a_missing_certificate_queues_its_measurement(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing because its server was stopped while the measurement waited."""

    async def read(*_: object) -> tuple[None, object]:
        return None, SimpleNamespace(digest=published.digest)

    published.forget_certificates()
    monkeypatch.setattr(certificates, "principal_of", lambda _: None)
    certifier = published.certifier(DIE)
    context = SimpleNamespace(control=SimpleNamespace(versions=SimpleNamespace(read=read), certifier=certifier))

    async def ask() -> CertificateState:
        return (await certificates.get_certificate.fn(None, context, "name", 1)).state

    for _ in range(2):
        assert asyncio.run(ask()) is CertificateState.PENDING
    assert certifier._waiting.qsize() == 1


def test_a_missing_packed_file_is_made_for_the_measurement(published: Published) -> None:
    """As after a change of the base model, before the first request for the adapter."""
    published.forget_certificates()
    content = published.packed.read_bytes()
    published.packed.unlink()
    assert published.certify(DIE).reason == "the measurement failed; the server's log says why"
    assert published.packed.read_bytes() == content
