import json
from pathlib import Path

import pytest

from loraserve.engine.pooling_defaults import pooling_defaults
from loraserve.engine.request import Pooling

SENTENCE_TRANSFORMERS = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": False, "include_prompt": True}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, Pooling.LAST),
        (json.dumps({**SENTENCE_TRANSFORMERS, "pooling_mode_lasttoken": True}), Pooling.LAST),
        (json.dumps({**SENTENCE_TRANSFORMERS, "pooling_mode_mean_tokens": True}), Pooling.MEAN),
        (json.dumps({"embedding_dimension": 64, "pooling_mode": "mean"}), Pooling.MEAN),
        (json.dumps({"embedding_dimension": 64, "pooling_mode": "lasttoken"}), Pooling.LAST),
        (json.dumps({**SENTENCE_TRANSFORMERS, "pooling_mode_cls_token": True}), None),
        (json.dumps({**SENTENCE_TRANSFORMERS, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}), None),
        (json.dumps(SENTENCE_TRANSFORMERS), None),
        ("[]", None),
        ("{", None),
    ],
)
def test_default_pooling_is_read_from_the_models_files(
    tmp_path: Path, declared: str | None, expected: Pooling | None
) -> None:
    if declared is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text(declared)
    assert pooling_defaults(str(tmp_path), None) == (expected, [])


def test_unsupported_modules_after_pooling_disable_it_with_a_note(tmp_path: Path) -> None:
    modules = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "st.Normalize"}]))
    assert pooling_defaults(str(tmp_path), None) == (Pooling.LAST, [])
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "st.models.Dense"}, {"type": 3}, 4]))
    pooling, (note,) = pooling_defaults(str(tmp_path), None)
    assert pooling is None
    assert "modules.json has unsupported modules (Dense)" in note
