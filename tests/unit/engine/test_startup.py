import json
import shutil
from pathlib import Path

import pytest

from loraserve import demo
from loraserve.engine.config import EngineConfig
from loraserve.engine.startup import ModelDescription, start

MIB = 1 << 20


def describe(tmp_path: Path, stated: dict[str, object], **options: object) -> ModelDescription:
    model = Path(demo.__file__).parent / "model"
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 258], **stated}))
    config = EngineConfig(
        str(folder),
        backend="reference",
        kv_cache_memory_bytes=4 * MIB,
        adapter_memory_bytes=4 * MIB,
        num_threads=1,
        **options,  # type: ignore[arg-type]
    )
    return start(config, lambda *_: None).description


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
def test_sampling_defaults_are_what_the_generation_config_states(
    tmp_path: Path, stated: dict[str, object], options: dict[str, object], expected: dict[str, object]
) -> None:
    description = describe(tmp_path, stated, **options)
    assert description.default_sampling == expected
    assert {258, 259} <= set(description.eos_token_ids), "what ends a text is no sampling default"
