import errno
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
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


def test_damaged_model_files_are_named(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "model", tmp_path, dirs_exist_ok=True)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole = {path: path.read_bytes() for path in (config, weights)}
    for damaged, content in (
        (config, b""),
        (config, b"[]"),
        (config, whole[config][:-9]),
        (weights, b""),
        (weights, whole[weights][:-9]),
        (weights, b"version https://git-lfs.github.com/spec/v1"),
    ):
        damaged.write_bytes(content)
        check = doctor_checks.model_files(str(tmp_path))
        assert check.status is Status.FAIL
        assert str(damaged) in check.found
        damaged.write_bytes(whole[damaged])
    config.write_bytes(
        whole[config].replace(b"{", b'{"unused": Infinity,', 1)
    )  # Python's JSON, which transformers reads
    assert doctor_checks.model_files(str(tmp_path)).status is Status.OK


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "model", tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model.safetensors.index.json"
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    assert doctor_checks.model_files(str(tmp_path)).status is Status.OK  # model.safetensors has precedence
    (tmp_path / "model.safetensors").rename(tmp_path / shards[0])
    check = doctor_checks.model_files(str(tmp_path))
    assert check.status is Status.FAIL
    assert f"lacks {shards[1]}" in check.found
    for damaged in (b"{", b"[]"):
        index.write_bytes(damaged)
        assert f"{index} is damaged" in doctor_checks.model_files(str(tmp_path)).found


def test_files_that_cannot_be_reached_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DEMO / "model", tmp_path / "dangling")
    (tmp_path / "dangling" / "model.safetensors").unlink()
    (tmp_path / "dangling" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    check = doctor_checks.model_files(str(tmp_path / "dangling"))
    assert check.status is Status.FAIL
    assert "model.safetensors: No such file" in check.found

    # Stands for a folder that this user may not enter: tests may run as root, who may enter any.
    hidden, stat = tmp_path / "locked" / "data", os.stat

    def guarded(path: object, **options: Any) -> os.stat_result:
        if str(path) == str(hidden):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)  # pyright: ignore[reportArgumentType]

    hidden.parent.mkdir()
    monkeypatch.setattr(os, "stat", guarded)
    monkeypatch.setattr(os, "access", lambda path, _mode: path != hidden.parent)
    assert doctor_checks.model_files(str(hidden)).status is Status.FAIL
    assert doctor_checks.disk(hidden).status is Status.FAIL


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
