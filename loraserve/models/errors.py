"""Why a model cannot be served."""


class ModelRefusedError(Exception):
    """The model is refused by name; the message says what was found and what would work."""
