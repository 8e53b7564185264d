from loraserve.serving.telemetry.adapter_labels import OTHER, AdapterLabels


def test_labels_are_bounded_and_free_only_once_released() -> None:
    labels = AdapterLabels(max_labels=2)
    found = [labels.acquire(name) for name in ("a", "b", "c", "a", "d")]
    assert found == ["a", "b", OTHER, "a", OTHER]
    for label in found:
        labels.leave(label)
    assert not labels.release("c")
    assert labels.release("a")
    assert [labels.acquire(name) for name in ("c", "a", "b")] == ["c", OTHER, "b"]


def test_a_label_in_use_by_requests_is_not_freed() -> None:
    labels = AdapterLabels(max_labels=1)
    for _ in range(2):
        assert labels.acquire("a") == "a"
    for _ in range(2):
        assert not labels.release("a")
        assert labels.acquire("b") == OTHER
        labels.leave("a")
    assert labels.release("a")
    assert labels.acquire("b") == "b"
