import gc
from collections.abc import Iterator

import pytest

from loraserve.serving.process.garbage_collector import calm_garbage_collector, nothing_collected


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


def test_what_is_imported_is_never_looked_at_by_the_garbage_collector() -> None:
    with nothing_collected():
        assert not gc.isenabled()
        imported = [[]]
    assert gc.isenabled()
    assert all(found is not imported for found in gc.get_objects())


def test_the_garbage_collector_runs_again_after_a_failed_import() -> None:
    with pytest.raises(ImportError), nothing_collected():
        raise ImportError("torch is broken")
    assert gc.isenabled()


def test_what_is_there_once_all_has_started_is_never_looked_at_again() -> None:
    there = [[]]
    calm_garbage_collector()
    assert all(found is not there for found in gc.get_objects())
    assert gc.isenabled()
    assert gc.get_threshold()[0] > 10_000
