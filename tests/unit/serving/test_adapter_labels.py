from loraserve.serving.adapter_labels import OTHER, AdapterLabels


def test_labels_are_bounded_and_never_move() -> None:
    labels = AdapterLabels(max_labels=2)
    assert [labels.label(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
    assert not labels.release("c")
    assert labels.release("a")
    assert [labels.label(name) for name in ("c", "a", "b")] == ["c", OTHER, "b"]
