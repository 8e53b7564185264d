"""Translates the upload store's errors for clients."""

from collections.abc import Iterator
from contextlib import contextmanager

from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.errors import OffsetError, UploadFileError, UploadNotFoundError, UploadStateError

OFFSET_HEADER = "upload-offset"


@contextmanager
def store_errors() -> Iterator[None]:
    try:
        yield
    except UploadNotFoundError as error:
        raise ServingError(ErrorCode.NOT_FOUND, sentence(str(error))) from None
    except OffsetError as error:
        headers = {OFFSET_HEADER: str(error.actual)}
        raise ServingError(ErrorCode.UPLOAD_OFFSET, sentence(str(error)), headers=headers) from None
    except UploadStateError as error:
        raise ServingError(ErrorCode.UPLOAD_STATE, sentence(str(error))) from None
    except UploadFileError as error:
        raise ServingError(ErrorCode.INVALID_VALUE, sentence(str(error)), param="files") from None


def sentence(text: str) -> str:
    """`text` as a sentence. A file name at its beginning is not capitalized."""
    begins_with_file = "." in text.partition(" ")[0].rstrip(".")
    first = text[:1] if begins_with_file else text[:1].upper()
    return first + text[1:].rstrip(".") + "."
