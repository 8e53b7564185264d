"""Classifiers: adapters with a head of their own, which answers with a number for each label, and with no text."""

from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.request import LabelActivation
from loraserve.serving.errors import invalid_value
from loraserve.store.records import ClassifierRecord


def check_has_text(adapter: ResolvedAdapter | None) -> None:
    """Raises `ServingError` where it is a classifier."""
    if adapter is not None and adapter.classifier is not None:
        message = f"names '{adapter.name}' (version {adapter.version}), a classifier, which has no text to answer with."
        more = " or /v1/rerank" if adapter.classifier.num_labels == 1 else ""
        raise invalid_value("model", f"{message} POST /v1/classify{more}.")


def classifier_of(adapter: ResolvedAdapter | None) -> ClassifierRecord:
    """Raises `ServingError` where it is none."""
    if adapter is None:
        raise invalid_value("model", "names the base model, which is no classifier: name an adapter that is.")
    if adapter.classifier is None:
        message = f"names '{adapter.name}' (version {adapter.version}), which is no classifier (task_type SEQ_CLS)."
        raise invalid_value("model", message)
    return adapter.classifier


def reranker_of(adapter: ResolvedAdapter | None) -> ClassifierRecord:
    """Raises `ServingError` where it is none."""
    classifier = classifier_of(adapter)
    if adapter is not None and classifier.num_labels > 1:
        message = (
            f"names '{adapter.name}' (version {adapter.version}), a classifier of {classifier.num_labels} labels; "
        )
        raise invalid_value("model", f"{message}documents are ranked by one with a single label.")
    return classifier


def activation_of(classifier: ClassifierRecord) -> LabelActivation:
    """What makes probabilities of its numbers; nothing does where they are none."""
    if classifier.problem_type == "regression":
        return LabelActivation.NONE
    is_each_by_itself = classifier.num_labels == 1 or classifier.problem_type == "multi_label_classification"
    return LabelActivation.SIGMOID if is_each_by_itself else LabelActivation.SOFTMAX
