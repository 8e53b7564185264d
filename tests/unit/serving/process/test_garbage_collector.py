import gc
from collections.abc import Iterator

import pytest

from loraserve.serving.process.garbage_collector import gc_disabled, tune_garbage_collector


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


def test_imported_objects_are_never_scanned_by_the_garbage_collector() -> None:
    with gc_disabled():
        assert not gc.isenabled()
        imported = [[]]
    assert gc.isenabled()
    assert all(found is not imported for found in gc.get_objects())


def test_the_garbage_collector_runs_again_after_a_failed_import() -> None:
    with pytest.raises(ImportError), gc_disabled():
        raise ImportError("torch is broken")
    assert gc.isenabled()


def test_objects_that_exist_after_startup_are_never_scanned_again() -> None:
    there = [[]]
    tune_garbage_collector()
    assert all(found is not there for found in gc.get_objects())
    assert gc.isenabled()
    assert gc.get_threshold()[0] > 10_000
