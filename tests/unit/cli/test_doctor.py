import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from loraserve_kernels import choose_backend
from loraserve_kernels.c_compiler import CompilerUnavailable
from loraserve_kernels.cpu_library import load_cpu_library

from loraserve.cli import doctor_checks
from loraserve.cli.doctor_checks import Status
from loraserve.cli.main import main
from loraserve.cli.serve.settings import DEMO
from loraserve.models import cpu_features


def test_the_demo_model_is_complete() -> None:
    assert doctor_checks.model_files(str(DEMO / "model")).status is Status.OK


def test_missing_model_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check = doctor_checks.model_files(str(tmp_path))
    assert check.status is Status.FAIL
    assert "tokenizer.json, *.safetensors" in check.found


def test_a_quantized_model_is_checked_as_at_server_start(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "model", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for bits, status, found in (
        (4, Status.OK, "MiB of weights, quantized with gptq; dequantized to bfloat16: "),
        (3, Status.FAIL, "bits (3) is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated | {"bits": bits}}))
        check = doctor_checks.model_files(str(tmp_path))
        assert check.status is status
        assert found in check.found
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert ", quantized with" not in doctor_checks.model_files(str(tmp_path)).found
    no_causal_model = {"model_type": "vit", "quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(no_causal_model))
    assert doctor_checks.model_files(str(tmp_path)).status is Status.FAIL


def test_a_model_name_that_is_not_cached_fails_unless_it_may_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check = doctor_checks.model_files("org/name")
    assert check.status is Status.FAIL
    where = "the local Hugging Face cache: `hf download` puts models there"
    assert check.found == f"org/name is neither a directory nor a model in {where}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert doctor_checks.model_files("org/name").status is Status.WARN


def test_a_port_in_use_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check = doctor_checks.port_is_free("127.0.0.1", taken.getsockname()[1])
    assert check.status is Status.FAIL
    assert "is in use" in check.found


def test_a_missing_data_directory_is_checked_by_its_parent(tmp_path: Path) -> None:
    assert doctor_checks.disk(tmp_path / "a" / "b").status is Status.OK
    (tmp_path / "file").touch()
    assert doctor_checks.disk(tmp_path / "file" / "a").status is Status.FAIL


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "available_memory_bytes", lambda: 5)
    assert doctor_checks.memory().status is Status.WARN


@pytest.mark.parametrize(
    ("num_gpus", "answer", "status", "found"),
    [
        (0, None, Status.OK, "no NVIDIA GPU"),
        (1, (SimpleNamespace(name="triton"), "triton: 3.6"), Status.OK, "triton: 3.6"),
        (1, (SimpleNamespace(name="reference"), "reference: pip install triton"), Status.WARN, "pip install triton"),
        (1, ValueError("cannot launch: install gcc"), Status.WARN, "install gcc"),
    ],
)
def test_a_gpu_whose_kernels_cannot_run_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, answer: object, status: Status, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(choose_backend, "choose_backend", Mock(side_effect=[answer]))
    check = doctor_checks.gpu_kernels()
    assert check.status is status
    assert found in check.found


@pytest.mark.parametrize(("is_fast", "found"), [(True, "fast bfloat16"), (False, "bfloat16 slow in torch")])
def test_bfloat16_speed_is_reported(monkeypatch: pytest.MonkeyPatch, is_fast: bool, found: str) -> None:
    monkeypatch.setattr(cpu_features, "has_fast_bfloat16", lambda: is_fast)
    check = doctor_checks.cpu()
    assert check.status is Status.OK
    assert found in check.found


def test_kernels_without_openmp_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        library = load_cpu_library()
    except CompilerUnavailable as error:
        pytest.skip(str(error))
    for openmp, status in (("libgomp.so.1", Status.OK), ("none", Status.WARN)):
        monkeypatch.setattr(choose_backend, "load_cpu_library", Mock(return_value=replace(library, openmp=openmp)))
        check = doctor_checks.kernels()
        assert check.status is status
        assert ("no OpenMP: one core" in check.found) == (openmp == "none")


@pytest.mark.parametrize(("port", "code"), [("0", 0), ("taken", 1)])
def test_the_exit_code_shows_whether_the_server_would_start(
    port: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "kernels", lambda: doctor_checks.Check("kernels", Status.WARN, "slow"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port if port == "0" else str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["doctor", "--json", "--port", port, "--data-dir", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert {check["name"] for check in json.loads(result.output)} >= {"python", "cpu", "memory", "port", "model"}
