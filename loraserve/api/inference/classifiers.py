"""Classifiers: adapters with their own head, which outputs a number per label instead of text."""

from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.request import LabelActivation
from loraserve.serving.errors import invalid_value
from loraserve.store.records import ClassifierRecord


def check_has_text(adapter: ResolvedAdapter | None) -> None:
    """Raises `ServingError` if the adapter is a classifier."""
    if adapter is not None and adapter.classifier is not None:
        message = f"names '{adapter.name}' (version {adapter.version}), a classifier, which cannot generate text."
        more = " or /v1/rerank" if adapter.classifier.num_labels == 1 else ""
        raise invalid_value("model", f"{message} POST /v1/classify{more}.")


def classifier_of(adapter: ResolvedAdapter | None) -> ClassifierRecord:
    """Raises `ServingError` if the adapter is not a classifier."""
    if adapter is None:
        raise invalid_value("model", "names the base model, which is not a classifier. Name an adapter that is one.")
    if adapter.classifier is None:
        message = f"names '{adapter.name}' (version {adapter.version}), which is not a classifier (task_type SEQ_CLS)."
        raise invalid_value("model", message)
    return adapter.classifier


def reranker_of(adapter: ResolvedAdapter | None) -> ClassifierRecord:
    """Raises `ServingError` if the adapter is not a classifier with a single label."""
    classifier = classifier_of(adapter)
    if adapter is not None and classifier.num_labels > 1:
        message = (
            f"names '{adapter.name}' (version {adapter.version}), a classifier with {classifier.num_labels} labels; "
        )
        raise invalid_value("model", f"{message}ranking documents requires one with a single label.")
    return classifier


def activation_of(classifier: ClassifierRecord) -> LabelActivation:
    """The function that turns the head's numbers into probabilities; none for regression."""
    if classifier.problem_type == "regression":
        return LabelActivation.NONE
    is_each_by_itself = classifier.num_labels == 1 or classifier.problem_type == "multi_label_classification"
    return LabelActivation.SIGMOID if is_each_by_itself else LabelActivation.SOFTMAX
