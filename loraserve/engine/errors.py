"""The engine's errors, with messages for people."""

from loraserve.engine.request import EngineErrorCode


class EngineStartError(Exception):
    """The engine cannot start; the message says what to change."""


class EngineStepError(Exception):
    """A step failed, and with it the engine; the message says what to change."""


class EngineRequestError(Exception):
    """The request is refused; the engine is untouched."""

    def __init__(self, message: str, code: EngineErrorCode = EngineErrorCode.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.code = code
