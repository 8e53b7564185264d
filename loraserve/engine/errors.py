"""What can go wrong in the engine, with messages for a person."""


class EngineStartError(Exception):
    """The engine cannot start; the message says what to change."""


class EngineRequestError(Exception):
    """The request is refused; the engine is untouched."""
