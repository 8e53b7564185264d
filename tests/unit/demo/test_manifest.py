"""The committed demo is what scripts/train_demo.py wrote, and as accurate as promised. Runs no model."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from loraserve.demo.skills import SKILLS

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "loraserve" / "demo"
MANIFEST = json.loads((DEMO / "manifest.json").read_text())


def sha256_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def adapter_config(name: str) -> dict:
    return json.loads((DEMO / "adapters" / name / "adapter_config.json").read_text())


def test_every_file_has_the_digest_in_the_manifest():
    paths = [path for folder in ("model", "adapters") for path in (DEMO / folder).rglob("*") if path.is_file()]
    assert {path.relative_to(DEMO).as_posix(): sha256_of(path) for path in paths} == MANIFEST["files"]


@pytest.mark.parametrize("source", MANIFEST["sources"])
def test_sources_are_unchanged_since_the_files_were_measured(source):
    assert sha256_of(ROOT / source) == MANIFEST["sources"][source]


def test_all_files_together_are_at_most_8_mb():
    assert sum((DEMO / path).stat().st_size for path in MANIFEST["files"]) <= 8_000_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("skill", SKILLS)
def test_each_skill_is_learned_by_its_own_adapter_only(dtype, skill):
    scores = {model: row[skill] for model, row in MANIFEST["exact_match"][dtype].items()}
    assert scores.keys() == {"base", *SKILLS}
    assert MANIFEST["num_held_out"] >= 200
    assert scores.pop(skill) >= 0.95
    assert max(scores.values()) < 0.20


def test_adapters_differ_in_rank_targets_and_variant():
    configs = [adapter_config(name) for name in SKILLS]
    assert len({config["r"] for config in configs}) >= 4
    assert len({tuple(sorted(config["target_modules"])) for config in configs}) >= 4
    assert any(config["use_rslora"] for config in configs)
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)
    assert any({"q_proj", "k_proj", "v_proj", "o_proj"} == set(config["target_modules"]) for config in configs)


def test_no_file_contains_paths_or_urls_of_the_machine_it_was_made_on():
    assert {adapter_config(name)["base_model_name_or_path"] for name in SKILLS} == {"loraserve-demo"}
    for path in (*DEMO.rglob("*.json"), *DEMO.rglob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        assert not any(place in text for place in ("/work", "/home", "/root", "/tmp", "://")), path
