from loraserve.serving.adapter_labels import OTHER, AdapterLabels


def test_labels_are_bounded_and_never_move() -> None:
    labels = AdapterLabels(max_labels=2)
    found = [labels.acquire(name) for name in ("a", "b", "c", "a", "d")]
    assert found == ["a", "b", OTHER, "a", OTHER]
    assert not any(labels.leave(label) for label in found)
    assert not labels.release("c")
    assert labels.release("a")
    assert [labels.acquire(name) for name in ("c", "a", "b")] == ["c", OTHER, "b"]


def test_a_label_goes_with_the_last_request_that_counts_for_it() -> None:
    labels = AdapterLabels(max_labels=1)
    for _ in range(2):
        assert labels.acquire("a") == "a"
    assert not labels.release("a")
    assert labels.acquire("b") == OTHER
    assert [labels.leave("a") for _ in range(2)] == [False, True]
    assert labels.acquire("b") == "b"
