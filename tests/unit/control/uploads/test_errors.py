import pytest

from loraserve.control.uploads.errors import store_errors
from loraserve.serving.errors import ServingError
from loraserve.store.errors import OffsetError, UploadStateError


@pytest.mark.parametrize(
    ("error", "begin"),
    [
        (OffsetError("adapter_model.safetensors", 0, 5), "adapter_model.safetensors: bytes"),
        (UploadStateError("x", "ready", "take more"), "Upload x is ready: cannot take more."),
    ],
)
def test_messages_are_sentences_but_file_names_are_not_capitalized(error: Exception, begin: str) -> None:
    with pytest.raises(ServingError) as raised, store_errors():
        raise error
    assert raised.value.message.startswith(begin)
