from pathlib import Path

from loraserve.store.engine_slots import EngineSlot, engine_ids


def test_concurrent_engines_have_different_ids(tmp_path: Path) -> None:
    first, second = EngineSlot(tmp_path), EngineSlot(tmp_path)
    try:
        assert (first.engine, second.engine) == ("engine-0", "engine-1")
    finally:
        first.release()
        second.release()


def test_a_released_id_is_used_again(tmp_path: Path) -> None:
    EngineSlot(tmp_path).release()
    again = EngineSlot(tmp_path)
    assert again.engine == "engine-0"
    assert engine_ids(tmp_path) == ["engine-0"]
    again.release()
    again.release()
